"""Weights that are replaced while engines serve: nothing that others computed is read, on either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fleet import until
from pair import TOKENS, Pair, half_published, is_in, order, prefilled
from ranks import Kv, TestEngine

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState, TransferState

pytestmark = pytest.mark.anyio


async def replace(engine: TestEngine, weights: str) -> None:
    await asyncio.gather(*(rank.client.replace_weights(weights) for rank in engine.ranks))


@pytest.fixture
async def engines(pair: Pair) -> AsyncIterator[Pair]:
    """The shared pair, which other tests find with the weights that it registered with."""
    yield pair
    await asyncio.gather(replace(pair.prefill, ""), replace(pair.decode, ""))


async def failed_with(pair: Pair, request_id: str, code: str) -> None:
    """The receive fails on every rank, on the first by this name, and no block is touched."""
    before, blocks, source = pair.decode.snapshot(), pair.decode.take(TOKENS), pair.prefill.source()
    outcomes = await pair.decode.outcomes(request_id, blocks, source=source, attempt=1)
    assert all(isinstance(outcome, KvferryError) for outcome in outcomes), outcomes
    assert code in {outcome.code for outcome in outcomes if isinstance(outcome, KvferryError)}
    assert not pair.decode.differences(before)


@pytest.mark.parametrize(("there", "here"), [("B", ""), ("", "B"), ("B", "C")])
async def test_what_other_weights_computed_is_refused_before_a_byte_moves(
    engines: Pair, request_id: str, there: str, here: str
) -> None:
    await replace(engines.prefill, there)
    await replace(engines.decode, here)
    await prefilled(engines, request_id)
    await failed_with(engines, request_id, "other_weights")
    errors = [record.error for router in engines.routers for record in await router.transfers(request_id)]
    (error, *_) = [error for error in errors if error is not None and error.code == "other_weights"]
    assert repr(there) in error.message and repr(here) in error.message and error.remedy


async def test_one_name_on_both_sides_is_read(engines: Pair, request_id: str) -> None:
    await replace(engines.prefill, "B")
    kv, _ = await prefilled(engines, request_id)
    await replace(engines.decode, "B")
    blocks = engines.decode.take(TOKENS)
    wanted = engines.decode.snapshot()
    engines.decode.write_into(wanted, kv, blocks)
    await engines.decode.receive(request_id, blocks, source=engines.prefill.source())
    assert not engines.decode.differences(wanted)


async def test_what_was_published_before_is_revoked_when_the_call_returns(engines: Pair, request_id: str) -> None:
    _, leases = await prefilled(engines, request_id)
    await replace(engines.prefill, "B")
    for router in engines.prefill_routers:
        assert request_id not in [
            lease.request_id for lease in await router.leases() if lease.state.value == "published"
        ]
    assert [await lease.ended() for lease in leases] == [LeaseState.REVOKED] * 2
    await replace(engines.decode, "B")
    await failed_with(engines, request_id, "lease_ended")


async def test_equal_weights_named_again_revoke_nothing(engines: Pair, request_id: str) -> None:
    _, leases = await prefilled(engines, request_id)
    await replace(engines.prefill, "")
    assert not any(lease.over for lease in leases)


async def test_what_is_on_its_way_to_replaced_weights_fails(engines: Pair, request_id: str) -> None:
    """One rank has begun to read what is published so far, and waits for more."""
    await half_published(engines, request_id)
    blocks = engines.decode.take(5000)
    receiving = asyncio.create_task(
        engines.decode.outcomes(request_id, blocks, source=engines.prefill.source(), deadline_s=60)
    )
    await until(lambda: is_in(engines.routers[0], request_id, TransferState.READING), "it is read")
    await replace(engines.decode, "B")
    outcomes = await receiving
    assert all(isinstance(outcome, TransferFailed) for outcome in outcomes), outcomes
    assert "other_weights" in {outcome.code for outcome in outcomes if isinstance(outcome, TransferFailed)}


async def test_a_reservation_that_waits_for_its_order_fails_with_the_weights_it_was_for(
    engines: Pair, request_id: str
) -> None:
    receiving = asyncio.create_task(engines.decode.outcomes(request_id, engines.decode.take(TOKENS)))
    await until(lambda: is_in(engines.routers[0], request_id, TransferState.WAITING), "it waits")
    await replace(engines.decode, "B")
    assert {getattr(outcome, "code", outcome) for outcome in await receiving} == {"other_weights"}


async def test_source_ranks_that_name_different_weights_are_not_read(engines: Pair, request_id: str) -> None:
    """By those that read both, or the one with other weights; KV is of use only if all ranks have it."""
    await engines.prefill.ranks[1].client.replace_weights("B")
    await prefilled(engines, request_id)
    source, blocks = engines.prefill.source(), engines.decode.take(TOKENS)
    _, *others = await engines.decode.outcomes(request_id, blocks, source=source, attempt=1)
    assert all(isinstance(outcome, KvferryError) for outcome in others), others
    assert "other_weights" in {outcome.code for outcome in others if isinstance(outcome, KvferryError)}


async def test_a_request_that_a_change_has_found_under_way_is_not_published_as_the_new_weights(
    engines: Pair, request_id: str
) -> None:
    """Its first tokens were computed by the old ones: not even by an engine that says nothing of weights."""
    kv, blocks, client = Kv.random(TOKENS), engines.prefill.take(TOKENS), engines.prefill.ranks[0].client
    await engines.prefill.publish(request_id, blocks, 10, more=True)
    await replace(engines.prefill, "B")
    with pytest.raises(KvferryError) as refused:
        await engines.prefill.publish(request_id, blocks, TOKENS)
    assert refused.value.code == "mixed_weights"
    with pytest.raises(KvferryError) as refused:
        await client.publish(request_id, blocks.tables(), TOKENS, weights="")
    assert (refused.value.code, refused.value.field) == ("mixed_weights", "weights")
    await asyncio.gather(*(rank.client.abort(request_id) for rank in engines.prefill.ranks))
    engines.prefill.write(kv, blocks)  # computed again
    await engines.prefill.publish(request_id, blocks, TOKENS)


async def test_an_order_that_brings_its_tables_reads_for_the_weights_that_the_engine_has(
    engines: Pair, request_id: str
) -> None:
    """Its router knows nothing of them."""
    await asyncio.gather(replace(engines.prefill, "B"), replace(engines.decode, "B"))
    await prefilled(engines, request_id)
    tables = {"tables": engines.decode.take(TOKENS).json()}
    ordered = await order(engines, request_id, destination=tables)
    assert (await engines.routers[0].wait(ordered)).state is TransferState.DONE


async def test_a_name_that_is_too_long_is_refused(engines: Pair) -> None:
    client = engines.prefill.ranks[0].client
    with pytest.raises(KvferryError) as refused:
        await client.replace_weights("B" * 257)
    assert (refused.value.code, client.weights) == ("malformed_weights", "")


async def test_the_daemon_shows_the_names(engines: Pair, request_id: str) -> None:
    await replace(engines.prefill, "step-7")
    await prefilled(engines, request_id)
    router = engines.prefill_routers[0]
    assert {engine.weights for engine in await router.engines()} == {"step-7"}
    assert [it.weights for it in await router.leases() if it.request_id == request_id] == ["step-7"]
