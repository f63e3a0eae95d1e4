"""The middleware for engines that cannot refuse a request: over ASGI, in front of an application that answers 200."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.asgi import CheckTransferParams


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def post(content: bytes) -> httpx.Response:
    app = CheckTransferParams(Starlette(routes=[Route("/", echo, methods=["POST"])]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        return await http.post("/", content=content)


def body(**more: Any) -> bytes:
    return json.dumps({"prompt": [1, 2, 3], **more}).encode()


MALFORMED = body(kv_transfer_params={"do_remote_prefill": "yes"})


@pytest.mark.anyio
@pytest.mark.parametrize(
    "content",
    [
        MALFORMED,
        MALFORMED.replace(b"params", rb"par\u0061ms"),
        MALFORMED.decode().encode("utf-16"),
        MALFORMED.decode().encode("utf-32-le"),
        body(vllm_xargs={"kv_transfer_params": {"do_remote_prefill": True}}),
    ],
    ids=["plain", "an escaped key", "UTF-16", "UTF-32", "in vllm_xargs"],
)
async def test_malformed_params_are_refused_in_every_form_that_json_has(content: bytes) -> None:
    answer = await post(content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_kv_transfer_params")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", "é".encode("latin-1"), body(prompt=["one", "two"]), body(kv_transfer_params={}),
        body(kv_transfer_params={"do_remote_decode": True}), body(prompt="says kv_transfer_params"),
        body(prompt=["one", "two"], kv_transfer_params={"do_remote_decode": True}),
        body(prompt=[[1], [2]], kv_transfer_params={"do_remote_decode": True}),
    ],
)  # fmt: skip
async def test_all_other_bodies_pass_unchanged(content: bytes) -> None:
    answer = await post(content)
    assert (answer.status_code, answer.content) == (200, content)
