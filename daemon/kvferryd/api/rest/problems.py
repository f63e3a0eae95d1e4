"""Every error as problem+json (RFC 9457) with a stable `code`, and the HTTP status of its kind."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kvferry.errors import KvferryError, Malformed
from kvferry.schemas import Problem, RefusalBody

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
"""A full daemon frees a place whenever a transfer ends, which is a matter of milliseconds to seconds."""
HTTP_CODES = {404: "no_such_route", 405: "method_not_allowed"}


def problem(error: KvferryError, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """The response that tells of an error. status: where it is not that of the error's kind."""
    status = error.kind.http if status is None else status
    body = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        code=error.code,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
        refusals=[
            RefusalBody(code=why.code, component=why.component, source=why.source, destination=why.destination)
            for why in error.refusals
        ],
    )  # fmt: skip
    more = dict(headers or {})
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        more["retry-after"] = str(RETRY_AFTER_S)
    if status == HTTPStatus.UNAUTHORIZED:
        more["www-authenticate"] = 'Bearer realm="kvferry"'
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
    if len(faults) == 1:
        return problem(first)
    listed = "; ".join(fault.message for fault in faults[:16]) + ("; and more" if len(faults) > 16 else "")
    several = f"{len(faults)} faults: {listed}"
    return problem(Malformed(first.code, several, field=first.field, value=first.value, remedy=first.remedy))


def _fault(entry: Mapping[str, object]) -> KvferryError:
    kind, place, said = str(entry["type"]), entry["loc"], str(entry["msg"])
    assert isinstance(place, tuple)
    field = ".".join(str(part) for part in place[1:]) or str(place[0])
    if kind == "json_invalid":
        return not_json(str(entry.get("ctx", "")))
    if kind == "missing":
        return Malformed("malformed_request", f"{field} is missing", field=field, remedy=f"add {field}")
    if kind == "extra_forbidden":
        remedy = "remove it, or look up its spelling in /openapi.json"
        return Malformed("malformed_request", f"{field} is not known", field=field, value=entry["input"], remedy=remedy)
    remedy = said[:1].lower() + said[1:]
    if kind == "string_pattern_mismatch" and field.endswith("address"):
        remedy = "write host:port, with brackets round an IPv6 address"
    return Malformed(
        "malformed_request", f"{field} is malformed: {said}", field=field, value=entry.get("input", ""), remedy=remedy
    )


def not_json(reason: str = "") -> KvferryError:
    return Malformed(
        "malformed_json", "the body is not JSON", field="body", value=reason, remedy="send one JSON object in UTF-8"
    )


def http_problem(routers: Sequence[APIRouter]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler of what the framework itself refuses: unknown routes, wrong methods, bodies it cannot read."""

    def methods(path: str) -> str:
        routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
        taken = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        return ", ".join(sorted(taken))

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == HTTPStatus.NOT_FOUND:
            message, remedy = f"there is no {path} here", "/openapi.json lists every route"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message, remedy = f"{path} does not take {request.method}", f"it takes {methods(path)}"
        elif error.status_code == HTTPStatus.BAD_REQUEST:  # JSON that is no UTF-8, or too deep, or a number too long
            return problem(not_json())
        else:
            message, remedy = str(error.detail), ""
        code = HTTP_CODES.get(error.status_code, "refused_request")
        fault = Malformed(code, message, field="path", value=path, remedy=remedy)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers = {"allow": methods(path)}
        return problem(fault, error.status_code, headers)

    return answer
