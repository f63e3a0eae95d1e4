"""The parts of /openapi.json beyond the schemas: tags, security, errors as problem+json; from examples.json the names
of operations, which generated clients take for their methods, and an example of every body and good answer."""

from __future__ import annotations

import json
from http import HTTPStatus
from importlib import resources
from typing import Any

from kvferry.schemas import Problem
from kvferryd.api.rest.problems import MEDIA_TYPE

TAGS: list[dict[str, Any]] = [
    {"name": "transfers", "description": "KV read from another engine into this daemon's: order, look up, abort"},
    {"name": "requests", "description": "everything this daemon holds for one request, on both sides"},
    {"name": "leases", "description": "KV of this daemon's engines that others may read"},
    {"name": "peers", "description": "engine ranks elsewhere with which a handshake is done"},
    {"name": "engines", "description": "engine ranks beside this daemon, with their manifests"},
    {"name": "explain", "description": "what a transfer between two caches would do"},
    {"name": "daemon", "description": "drain, health, metrics and the status page"},
]
WHEN = {
    401: ("unauthorized", "no token, or a wrong one"),
    403: ("address_not_allowed", "the source's address is not in allow_peers"),
    404: ("unknown_transfer", "nothing here has this id"),
    409: ("order_conflict", "another order was made under this request_id"),
    413: ("body_too_large", "the body has more than 4 MiB"),
    415: ("unsupported_media_type", "the body is not application/json"),
    422: ("malformed_request", "the request is malformed, or cannot be done"),
    429: ("full", "no more can be taken now; Retry-After says when to ask again"),
    500: ("internal", "the daemon failed, or refused the request for a reason that is not listed: look at `code`"),
    502: ("peer_unreachable", "the other daemon does not answer"),
    503: ("draining", "the daemon takes no more work"),
    504: ("deadline", "the other daemon did not answer in time"),
}
SECURITY = {
    "token": {"type": "http", "scheme": "bearer", "description": "a line of the daemon's `token_file`"},
    "certificate": {"type": "mutualTLS", "description": "with `rest_tls`: a certificate that `tls_ca` has signed"},
}
UNASKED = ("/healthz", "/readyz")
"""Routes that ask for no token."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer with these errors, beside those that every route has."""
    return {status: _response(status) for status in sorted({*statuses, 422})}


def _response(status: int) -> dict[str, Any]:
    code, when = WHEN[status]
    example = {"title": HTTPStatus(status).phrase, "status": status, "detail": when, "code": code}
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": example}
    return {"description": f"`{code}`: {when}", "content": {MEDIA_TYPE: content}}


def document(generated: dict[str, Any], *, token: bool, certificate: bool) -> dict[str, Any]:
    """The document FastAPI generates, with names, examples, Problem among its schemas, and what the daemon asks for."""
    told = json.loads(resources.files(__package__).joinpath("examples.json").read_text(encoding="utf-8"))
    components = generated["components"]
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components["schemas"] |= {**schema.pop("$defs"), "Problem": schema}
    components["securitySchemes"] = SECURITY
    tls: dict[str, list[str]] = {"certificate": []} if certificate else {}
    generated["security"] = _one(tls | ({"token": []} if token else {}))
    for path, operations in generated["paths"].items():
        for method, operation in operations.items():
            of = told[f"{method.upper()} {path}"]
            operation["operationId"], responses = of["operation"], operation["responses"]
            if "bodies" in of:
                operation["requestBody"]["content"]["application/json"]["examples"] = of["bodies"]
            for status, answers in of["answers"].items():
                for content in responses[status]["content"].values():
                    content["examples"] = answers
            if path in UNASKED:
                operation["security"] = _one(tls)
            elif token:
                responses["401"] = _response(401)
            responses["default"] = _response(500)
    return generated


def _one(schemes: dict[str, list[str]]) -> list[dict[str, list[str]]]:
    return [schemes] if schemes else []
