"""Tests that speak gRPC on loops of their own, in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import grpc
import pytest

pytestmark = pytest.mark.anyio
METHOD = "/kvferry.Test/Answer"


@pytest.fixture
async def answering() -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """The address of a server, when it has been asked, and what it waits for before it answers."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def handle(request: bytes, context: object) -> bytes:
        asked.set()
        await answer.wait()
        return request

    server = grpc.aio.server()
    method = {METHOD.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvferry.Test", method),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", asked, answer
    await server.stop(None)


async def test_an_answer_to_a_loop_that_is_closed_is_no_fault_of_the_next(
    answering: tuple[str, asyncio.Event, asyncio.Event],
) -> None:
    address, asked, answer = answering
    other, asks, kept = asyncio.new_event_loop(), threading.Event(), []

    async def ask() -> None:
        channel = grpc.aio.insecure_channel(address)
        kept.append((channel, channel.unary_unary(METHOD)(b"")))
        asks.set()
        await kept[-1][1]

    def run() -> None:
        asking = other.create_task(ask())
        other.run_forever()
        kept.append((asking, None))

    thread = threading.Thread(target=run)
    thread.start()
    await asked.wait()
    other.call_soon_threadsafe(other.stop)
    await asyncio.to_thread(thread.join)
    other.close()
    answer.set()
    async with grpc.aio.insecure_channel(address) as channel:
        assert await channel.unary_unary(METHOD)(b"again") == b"again"
