"""Pages of our own: files that ask the API of the process that sends them. They hold no data, so they are sent without
a token."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from fastapi import APIRouter, Request, Response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    # Only these files run and they reach only this process; no text becomes markup, whatever a script of ours does.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
}
Files = Mapping[str, tuple[bytes, str]]
"""(the file, its media type) by path."""


def files(package: str, at: str = "/") -> Files:
    """The page whose own files are in the assets of this package, and what all pages share. at: the path of its
    index.html, which ends with a slash."""
    folders = [resources.files(each).joinpath("assets") for each in (__name__, package)]
    return {
        at if each.name == "index.html" else f"{at}page/{each.name}": (
            each.read_bytes(), KINDS[each.name.rpartition(".")[2]],
        )
        for folder in folders
        for each in folder.iterdir()
    }  # fmt: skip


def routes(files: Files) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def file(request: Request) -> Response:
        body, kind = files[request.scope["route"].path]
        return Response(body, headers=HEADERS, media_type=kind)

    for path in files:
        router.add_api_route(path, file)
    return router
