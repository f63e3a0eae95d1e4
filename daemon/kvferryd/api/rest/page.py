"""The status page: files of our own that ask the API. They hold no data, so they are sent without a token."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Request, Response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    # Only these files run and they reach only this daemon; no text becomes markup, whatever a script of ours does.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
}
FILES = {
    "/" if each.name == "index.html" else f"/page/{each.name}": (each.read_bytes(), KINDS[each.name.rpartition(".")[2]])
    for each in resources.files(__package__).joinpath("assets").iterdir()
}
"""By path: (the file, its media type)."""


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def file(request: Request) -> Response:
        body, kind = FILES[request.scope["route"].path]
        return Response(body, headers=HEADERS, media_type=kind)

    for path in FILES:
        router.add_api_route(path, file)
    return router
