"""Which way a transfer goes, and what is said of the others."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from fleet import Daemons
from lives import engine_on, published
from pair import Pair, prefilled

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient

pytestmark = pytest.mark.anyio


async def test_the_record_has_the_way_and_what_it_was_expected_to_take(pair: Pair, request_id: str) -> None:
    _, _ = await prefilled(pair, request_id)
    await pair.decode.receive(request_id, pair.decode.take(200), source=pair.prefill.source())
    (record,) = await pair.routers[0].transfers(request_id)
    assert (record.path, record.transport) == ("direct", "UCX")
    assert list(record.estimate_ms) == ["direct"] and record.estimate_ms["direct"] > 0


async def test_a_peer_says_why_it_is_not_mapped(pair: Pair, request_id: str) -> None:
    await prefilled(pair, request_id)
    await pair.decode.receive(request_id, pair.decode.take(200), source=pair.prefill.source())
    found = [peer for peer in await pair.routers[0].peers() if peer.engine_id == "prefill"]
    assert [(peer.ways["direct"], "host memory" in peer.ways["mapped"]) for peer in found] == [("", True)] * len(found)


async def test_a_forced_way_that_is_impossible_fails_and_says_why(
    pair: Pair, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("forced", 1, "--way", "mapped")
    router = await stack.enter_async_context(RouterClient(daemon.url))
    engine, _ = await engine_on(stack, "forced", daemon)
    source, _ = await engine_on(stack, "source", (await daemons.start("forced-source"))[0])
    await published(source, request_id)
    with pytest.raises(TransferFailed, match="host memory") as caught:
        await engine.receive(request_id, engine.take(50), source=source.source())
    assert (caught.value.code, caught.value.blocks_safe) == ("way_unavailable", True)
    (record,) = await router.transfers(request_id)
    assert (record.error.code, record.path) == ("way_unavailable", "")
