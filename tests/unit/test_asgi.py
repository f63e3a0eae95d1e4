"""The middleware that answers malformed kv_transfer_params with 400, before an engine that cannot."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvferry.asgi import CheckTransferParams

pytestmark = pytest.mark.anyio
NAMED = {
    "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r", "remote_host": "h", "remote_port": 9,
}  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"read": (await request.body()).decode(), "method": request.method})


async def asked(body: bytes, method: str = "POST") -> httpx.Response:
    app = Starlette(
        routes=[Route("/v1/completions", echo, methods=["GET", "POST"])], middleware=[Middleware(CheckTransferParams)]
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        return await http.request(method, "/v1/completions", content=body)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"do_remote_prefill": True}, "kv_transfer_params.remote_engine_id"),
        ({"do_remote_prefill": "yes"}, "kv_transfer_params.do_remote_prefill"),
        (NAMED | {"remote_port": 70_000}, "kv_transfer_params.remote_port"),
        (NAMED | {"remote_num_tokens": -1}, "kv_transfer_params.remote_num_tokens"),
        ("do_remote_prefill", "kv_transfer_params"),
    ],
)
@pytest.mark.parametrize("where", ["body", "vllm_xargs"])
async def test_what_is_malformed_is_answered_400(params: Any, field: str, where: str) -> None:
    held = {"kv_transfer_params": params}
    body = held if where == "body" else {"vllm_xargs": held}
    answer = await asked(json.dumps({"prompt": "Once"} | body).encode())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("malformed_kv_transfer_params", field)
    assert "hand over the object" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "Once"}',
        json.dumps({"kv_transfer_params": NAMED}).encode(),
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'["kv_transfer_params"]',
        b"kv_transfer_params, but no JSON",
        b'{"kv_transfer_params": ' + b"[" * 100_000,
        b"",
        b"x" * 300_000,
    ],
)
async def test_everything_else_reaches_the_engine_as_it_is(body: bytes) -> None:
    answer = await asked(body)
    assert answer.status_code == 200
    assert answer.json()["read"].encode() == body


async def test_other_methods_pass() -> None:
    assert (await asked(b"", "GET")).json()["method"] == "GET"
