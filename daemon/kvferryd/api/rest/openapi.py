"""What /openapi.json has beyond the schemas: tags, examples, and errors as problem+json."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.openapi.models import Example

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
    502: ("peer_unreachable", "the other daemon does not answer"),
    503: ("draining", "the daemon takes no more work"),
    504: ("deadline", "the other daemon did not answer in time"),
}

ORDERS: dict[str, Example] = {
    "reserved": {
        "summary": "the engine reserves its blocks itself",
        "value": {"request_id": "cmpl-1", "source": {"engine_id": "prefill-0", "address": "10.0.0.7:7411"}},
    },
    "with tables": {
        "summary": "the order names the blocks",
        "value": {
            "request_id": "cmpl-2",
            "source": {"engine_id": "prefill-0", "address": "10.0.0.7:7411", "epoch": "5f0c"},
            "destination": {"tables": {"full": {"block_ids": [4, 7, 9], "first_token": 0}}, "token_range": [0, 41]},
            "priority": 1,
            "deadline_ms": 5000,
        },
    },
}
PREWARM: dict[str, Example] = {"prewarm": {"value": {"engine_id": "prefill-0", "address": "10.0.0.7:7411"}}}
DRAIN: dict[str, Example] = {"hold the answer": {"value": {"wait_s": 60}}}


def _cache(engine_id: str, block_size: int) -> dict[str, object]:
    """One layer's keys, four heads of eight bfloat16: a small manifest."""
    token, blocks = 4 * 8 * 2, 64 // block_size
    axes = [("block", blocks, block_size * token), ("slot", block_size, token), ("head", 4, 16), ("dim", 8, 2)]
    return {
        "engine_id": engine_id,
        "epoch": "5f0c",
        "model": {"name": "tiny", "fingerprint": "tiny-1"},
        "regions": [{"id": 0, "kind": "host", "nbytes": 64 * token}],
        "groups": [{"name": "full", "block_size": block_size, "num_blocks": blocks}],
        "components": [{
            "group": "full", "layer": 0, "name": "k", "dtype": "bfloat16", "region": 0, "offset": 0,
            "axes": [{"name": name, "extent": extent, "stride": stride} for name, extent, stride in axes],
        }],
    }  # fmt: skip


def _table(*block_ids: int) -> dict[str, object]:
    return {"full": {"block_ids": list(block_ids), "first_token": 0}}


_PAIR = {"sources": [_cache("prefill-0", 4)], "destination": _cache("decode-0", 8)}
_TABLES = {"source": _table(5, 2), "destination": _table(3), "tokens": [0, 8]}
EXPLAIN: dict[str, Example] = {"summary": {"value": _PAIR}, "every run": {"value": {**_PAIR, "tables": _TABLES}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer with these errors, beside those that every route has."""
    return {status: _response(status) for status in sorted({*statuses, 422})}


def _response(status: int) -> dict[str, Any]:
    code, when = WHEN[status]
    example = {"title": HTTPStatus(status).phrase, "status": status, "detail": when, "code": code}
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": example}
    return {"description": f"`{code}`: {when}", "content": {MEDIA_TYPE: content}}


def document(generated: dict[str, Any], *, authenticated: bool) -> dict[str, Any]:
    """The document FastAPI generates, with Problem among its schemas and, where asked for, the bearer token."""
    components = generated["components"]
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components["schemas"] |= {**schema.pop("$defs"), "Problem": schema}
    if authenticated:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        generated["security"] = [{"token": []}]
        for path, operations in generated["paths"].items():
            for operation in operations.values():
                if path in ("/healthz", "/readyz"):
                    operation["security"] = []
                else:
                    operation["responses"]["401"] = _response(401)
    return generated
