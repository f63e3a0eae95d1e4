"""Every error as problem+json (RFC 9457) with a stable `code`, and the HTTP status of its kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvferry.errors import KvferryError, Malformed
from kvferry.schemas import ADDRESS_REMEDY, Problem, RefusalBody

MEDIA_TYPE = "application/problem+json"
OF_STATUS = {
    # A full daemon frees a place whenever a transfer ends, which is a matter of milliseconds to seconds.
    429: {"retry-after": "1"},
    401: {"www-authenticate": 'Bearer realm="kvferry"'},
}
"""Headers."""
OF_HTTP = {
    "no_such_route": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
}
"""Codes for which HTTP has a status of its own. All others have that of their kind."""


def problem(error: KvferryError, headers: Mapping[str, str] | None = None) -> Response:
    """An error as a response."""
    status = OF_HTTP.get(error.code, error.kind.http)
    body = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        code=error.code,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
        refusals=[RefusalBody(**dataclasses.asdict(why)) for why in error.refusals],
    )
    more = {**OF_STATUS.get(status, {}), **(headers or {})}
    # Escaped to ASCII, as what is echoed may hold lone surrogates, which have no UTF-8.
    return Response(json.dumps(body.model_dump(mode="python")), status, more, MEDIA_TYPE)


async def kvferry_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    return problem(error)


async def validation_problem(request: Request, error: Exception) -> Response:
    """A body or query that breaks its schema: the first fault as field, value and remedy, all of them in `detail`."""
    assert isinstance(error, RequestValidationError)
    faults = [_fault(entry) for entry in error.errors()]
    first = faults[0]
    if len(faults) > 1:
        listed = "; ".join(fault.message for fault in faults[:16]) + ("; and more" if len(faults) > 16 else "")
        several = f"{len(faults)} faults: {listed}"
        first = Malformed(first.code, several, field=first.field, value=first.value, remedy=first.remedy)
    return problem(first)


def _fault(entry: Mapping[str, object]) -> KvferryError:
    kind, place, said = str(entry["type"]), entry["loc"], str(entry["msg"])
    assert isinstance(place, tuple)
    field = ".".join(str(part) for part in place[1:]) or str(place[0])
    value, message, remedy = entry.get("input", ""), f"{field} is malformed: {said}", said[:1].lower() + said[1:]
    if kind == "json_invalid":
        return not_json(str(entry.get("ctx", "")))
    if kind == "missing":
        value, message, remedy = "", f"{field} is missing", f"add {field}"
    elif kind == "extra_forbidden":
        message, remedy = f"{field} is not known", "remove it, or look up its spelling in /openapi.json"
    elif kind == "string_pattern_mismatch" and field.endswith("address"):
        remedy = ADDRESS_REMEDY
    return Malformed("malformed_request", message, field=field, value=value, remedy=remedy)


def not_json(reason: str = "") -> KvferryError:
    remedy = "send one JSON object in UTF-8"
    return Malformed("malformed_json", "the body is not JSON", field="body", value=reason, remedy=remedy)


async def http_problem(request: Request, error: Exception) -> Response:
    """Refusals by the framework itself: unknown routes, wrong methods, bodies it cannot read."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == HTTPStatus.BAD_REQUEST:  # JSON that is no UTF-8, or too deep, or a number too long
        return problem(not_json())
    if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
        message, remedy = f"there is no {path} here", "/openapi.json lists every route"
        return problem(Malformed("no_such_route", message, field="path", value=path, remedy=remedy))
    routes = (route for route in request.app.state.routes if route.path_regex.match(path))
    methods = ", ".join(sorted({method for route in routes for method in route.methods}))
    message, remedy = f"{path} does not take {request.method}", f"it takes {methods}"
    fault = Malformed("method_not_allowed", message, field="path", value=path, remedy=remedy)
    return problem(fault, {"allow": methods})
