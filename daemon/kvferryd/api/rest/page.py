"""The status page: one file that fetches the API. It holds no data, so it is sent without a token."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter, Response


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    html = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(html),
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
    }

    @router.get("/")
    async def page() -> Response:
        return Response(html, headers=headers, media_type="text/html")

    return router


def _policy(html: str) -> str:
    """Only this page's own script and style run, and they reach only this daemon."""

    def digest(tag: str) -> str:
        found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert found is not None
        return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
