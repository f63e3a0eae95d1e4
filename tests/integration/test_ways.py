"""Which way a transfer goes, and what is said of the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeAlias

import httpx
import pytest
from fleet import Daemons
from lives import engine_on, published
from pair import Pair, prefilled
from ranks import Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody
from kvferryd.commands.cli import main
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio


Ran: TypeAlias = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def explain(pair: Pair, capsys: pytest.CaptureFixture[str]) -> Ran:
    """`kvferry explain --transfer` at decode's daemon: its exit status, stdout and stderr."""

    async def ran(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        command = "explain", "--daemon", pair.decode.daemons[0].url, "--transfer", *arguments
        status = await asyncio.to_thread(main, command)
        return status, *capsys.readouterr()

    return ran


async def test_record_and_peer_and_explain_say_which_path_was_taken_and_why_not_another(
    pair: Pair, request_id: str, explain: Ran
) -> None:
    await prefilled(pair, request_id)
    await pair.decode.receive(request_id, pair.decode.take(200), source=pair.prefill.source())
    (record,) = await pair.routers[0].transfers(request_id)
    assert (record.path, record.transport) == ("direct", "UCX")
    found = [peer for peer in await pair.routers[0].peers() if peer.engine_id == "prefill"]
    assert [(peer.ways["direct"], "host memory" in peer.ways["mapped"]) for peer in found] == [("", True)] * len(found)

    status, said, _ = await explain(request_id)
    assert status == 0 and f"request {request_id}, from prefill to decode: done" in said
    lines = [line.split() for line in said.splitlines()]
    assert any(line[:1] == ["direct"] and line[-1:] == ["taken"] for line in lines)
    assert "cannot: rank 0" in next(line for line in said.splitlines() if line.startswith("mapped"))
    status, said, _ = await explain(request_id, "--json")
    answer = json.loads(said)
    assert answer["transfer"]["transfer_id"] == record.transfer_id and "mapped" in answer["refused_ways"]
    status, _, wrong = await explain("nobody")
    assert status == 2 and "knows no transfer and no request nobody" in wrong

    assert await pair.routers[0].forget_peer("prefill")
    status, said, _ = await explain(request_id)
    assert status == 0
    of_mapped = next(line for line in said.splitlines() if line.startswith("mapped"))
    assert "not known: the source is no peer any more" in of_mapped
    status, said, _ = await explain(request_id, "--json")
    assert status == 0 and json.loads(said)["refused_ways"] is None


async def test_a_forced_way_that_is_impossible_fails_and_says_why(
    daemons: Daemons, far: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("forced", 1, "--way", "mapped")
    router = await stack.enter_async_context(RouterClient(daemon.url))
    engine, _ = await engine_on(stack, "forced", daemon)
    source, _ = await engine_on(stack, "source", far)
    await published(source, request_id)
    with refused("way_unavailable", TransferFailed, match="host memory", blocks_safe=True):
        await engine.receive(request_id, engine.take(50), source=source.source())
    (record,) = await router.transfers(request_id)
    assert (record.error.code, record.path) == ("way_unavailable", "")


async def test_an_order_may_force_its_own_way(daemons: Daemons, stack: AsyncExitStack, request_id: str) -> None:
    near, far = await daemons.start("own-way-source", 1, "--way", "staged"), await daemons.start("own-way", 2)
    router = await stack.enter_async_context(RouterClient(far[0].url))
    source, _ = await engine_on(stack, "own-way-source", near[0])
    reader = await TestEngine.start("own-way", far, Shape.tp(2, num_blocks=16))
    stack.push_async_callback(reader.close)
    await published(source, request_id, readers=1)
    receiving = asyncio.create_task(reader.outcomes(request_id, reader.take(50)))
    await router.order(OrderBody(request_id=request_id, source=source.source(), way="mapped"))
    for outcome in await receiving:  # the other rank was told as well
        assert isinstance(outcome, TransferFailed)
        assert outcome.code in ("way_unavailable", "rank_failed")
    for way in ("direct", "auto"):
        kv, _ = await published(source, f"{request_id}-{way}")
        expected, blocks = reader.snapshot(), reader.take(50)
        reader.write_into(expected, kv, blocks)
        await reader.receive(f"{request_id}-{way}", blocks, source=source.source(), way=way)
        assert not reader.differences(expected)


async def test_there_is_no_other_way(pair: Pair, request_id: str) -> None:
    blocks, said = pair.decode.take(10), {"attempt": pair.decode.next_attempt(), "way": "teleport"}
    with refused("malformed_way", value="teleport"):
        await pair.decode.ranks[0].client.receive(request_id, blocks.tables(), source=pair.prefill.source(), **said)
    body = OrderBody(request_id=request_id, source=pair.prefill.source()).model_dump() | {"way": "teleport"}
    async with httpx.AsyncClient(base_url=pair.decode.daemons[0].url, trust_env=False) as http:
        answer = await http.post("/v1/transfers", json=body)
    assert answer.status_code == 422
    assert "way" in answer.text
