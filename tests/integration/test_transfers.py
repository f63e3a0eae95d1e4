"""A request's KV from one engine to another: TP2, blocks of 16, NHD to TP3, blocks of 24, HND."""

from __future__ import annotations

import asyncio

import pytest
from fleet import until
from pair import TOKENS, Pair, all_in, is_in, order, prefilled
from ranks import STATE_NBYTES, TOKEN_NBYTES, Blocks, Kv

from kvferry.engine import Received, TransferFailed
from kvferry.schemas import DestinationBody, LeaseState, TransferState

pytestmark = pytest.mark.anyio


def by_tables(*, by_rank: bool, blocks: Blocks, tokens: tuple[int, int]) -> DestinationBody:
    tables = {str(rank): blocks.json() for rank in range(3)} if by_rank else blocks.json()
    return DestinationBody(tables=tables, token_range=tokens)


# how the two halves of a transfer meet


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("first", ["order", "reservation"])
async def test_one_order_at_any_rank_moves_every_byte_to_all_ranks(
    pair: Pair, request_id: str, rank: int, first: str
) -> None:
    kv, leases = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)

    if first == "order":
        transfer_id = await order(pair, request_id, rank)
        receiving = asyncio.create_task(pair.decode.receive(request_id, blocks, (0, TOKENS)))
    else:
        receiving = asyncio.create_task(pair.decode.receive(request_id, blocks, (0, TOKENS)))
        await all_in(pair.routers, request_id, TransferState.WAITING)
        transfer_id = await order(pair, request_id, rank)
    received = await receiving

    record = await pair.routers[rank].wait(transfer_id)
    assert not pair.decode.differences(expected)
    assert [each.tokens for each in received] == [(0, TOKENS)] * 3
    assert record.state is TransferState.DONE
    assert [(share.rank, share.state) for share in record.ranks] == [(i, TransferState.DONE) for i in range(3)]
    assert record.bytes == sum(each.nbytes for each in received) == TOKENS * TOKEN_NBYTES + STATE_NBYTES
    assert (record.path, record.transport, record.tokens) == ("direct", "UCX", (0, TOKENS))
    assert {"waiting", "connecting", "reading", "verifying", "total"} <= record.phases_ms.keys()
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


@pytest.mark.parametrize("published_first", [True, False])
async def test_an_engine_may_order_for_itself(pair: Pair, request_id: str, published_first: bool) -> None:
    kv, blocks, source = Kv.random(TOKENS), pair.decode.take(TOKENS), pair.prefill.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    pair.prefill.write(kv, source)
    if published_first:
        await pair.prefill.publish(request_id, source, TOKENS)
    receiving = asyncio.create_task(pair.decode.receive(request_id, blocks, source=pair.prefill.source()))
    if not published_first:
        await until(
            lambda: is_in(pair.routers[0], request_id, TransferState.CONNECTING), "the reader waits for a publish"
        )
        await pair.prefill.publish(request_id, source, TOKENS)
    assert [each.tokens for each in await receiving] == [(0, TOKENS)] * 3
    assert not pair.decode.differences(expected)


async def test_the_source_that_rank_0_names_is_enough_for_all_ranks(pair: Pair, request_id: str) -> None:
    kv, _ = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    (first, *others), attempt = (rank.client for rank in pair.decode.ranks), pair.decode.next_attempt()
    await asyncio.gather(
        first.receive(request_id, blocks.tables(), source=pair.prefill.source(), attempt=attempt),
        *(other.receive(request_id, blocks.tables(), attempt=attempt) for other in others),
    )
    assert not pair.decode.differences(expected)


async def test_ranks_may_name_different_daemons_of_the_same_source(pair: Pair, request_id: str) -> None:
    kv, _ = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    sources, attempt = [pair.prefill.source(rank % 2) for rank in range(3)], pair.decode.next_attempt()
    await asyncio.gather(
        *(
            rank.client.receive(request_id, blocks.tables(), source=source, attempt=attempt)
            for rank, source in zip(pair.decode.ranks, sources, strict=True)
        )
    )
    assert not pair.decode.differences(expected)


@pytest.mark.parametrize("by_rank", [False, True], ids=["one set for all", "by rank"])
async def test_an_order_with_tables_needs_no_reservation(pair: Pair, request_id: str, by_rank: bool) -> None:
    kv, leases = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    wanted = by_tables(by_rank=by_rank, blocks=blocks, tokens=(0, TOKENS))
    record = await pair.routers[1].wait(await order(pair, request_id, 1, destination=wanted))
    assert record.state is TransferState.DONE
    assert not pair.decode.differences(expected)
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


async def test_tables_by_rank_may_name_other_blocks_on_every_rank(pair: Pair, request_id: str) -> None:
    kv, _ = await prefilled(pair, request_id)
    blocks = [pair.decode.take(TOKENS) for _ in range(3)]
    expected = pair.decode.snapshot()
    for rank, own in enumerate(blocks):
        pair.decode.shape.write(rank, expected[rank], kv, own, (0, TOKENS), True)
    wanted = DestinationBody(tables={str(rank): own.json() for rank, own in enumerate(blocks)})
    record = await pair.routers[0].wait(await order(pair, request_id, destination=wanted))
    assert record.state is TransferState.DONE, record.error
    assert not pair.decode.differences(expected)


async def test_a_later_turn_flows_from_decode_to_prefill(pair: Pair, request_id: str) -> None:
    kv, source = pair.decode.filled(77)
    leases = await pair.decode.publish(request_id, source, 77)
    await pair.prefill.gets(request_id, kv, source=pair.decode.source(2))
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 3


# what travels


async def test_metadata_is_handed_to_every_reader_as_it_is(pair: Pair, request_id: str) -> None:
    metadata = bytes(range(256)) * 256  # 64 KiB
    await prefilled(pair, request_id, metadata=metadata)
    received = await pair.decode.receive(request_id, pair.decode.take(TOKENS), source=pair.prefill.source())
    assert [each.metadata for each in received] == [metadata] * 3


async def test_a_reader_follows_a_prefill_chunk_by_chunk_and_the_state_comes_last(pair: Pair, request_id: str) -> None:
    kv, blocks, source = Kv.random(TOKENS), pair.decode.take(TOKENS), pair.prefill.take(TOKENS)
    expected = pair.decode.snapshot()
    receiving = asyncio.create_task(pair.decode.receive(request_id, blocks, source=pair.prefill.source()))
    chunks = [(0, 50), (50, 51), (51, 160), (160, TOKENS)]
    for start, stop in chunks:
        last = stop == TOKENS
        pair.prefill.write(kv, source, (start, stop), state=last)
        await pair.prefill.publish(request_id, source, stop, more=not last, metadata=b"end" if last else b"")
        pair.decode.write_into(expected, kv, blocks, (start, stop), state=last)

        async def arrived() -> bool:
            return not pair.decode.differences(expected)

        await until(arrived, f"tokens {start} to {stop}: {pair.decode.differences(expected)}")
        assert receiving.done() is False or last
    received = await receiving
    assert [(each.tokens, each.metadata) for each in received] == [((0, TOKENS), b"end")] * 3
    assert sum(each.nbytes for each in received) == TOKENS * TOKEN_NBYTES + STATE_NBYTES


async def test_the_last_publish_may_add_no_tokens(pair: Pair, request_id: str) -> None:
    kv, blocks, source = Kv.random(90), pair.decode.take(90), pair.prefill.take(90)
    expected = pair.decode.expecting(kv, blocks)
    pair.prefill.write(kv, source)
    await pair.prefill.publish(request_id, source, 90, more=True)
    receiving = asyncio.create_task(pair.decode.receive(request_id, blocks, (0, 90), source=pair.prefill.source()))
    leases = await pair.prefill.publish(request_id, source, 90, metadata=b"now")
    assert [each.metadata for each in await receiving] == [b"now"] * 3
    assert not pair.decode.differences(expected)
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


@pytest.mark.parametrize(("first_token", "start"), [(24, 37), (24, 24), (48, 37), (168, 199)])
async def test_a_prefix_that_is_cached_is_not_touched(
    pair: Pair, request_id: str, first_token: int, start: int
) -> None:
    kv, _ = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS, first_token)
    received = await pair.decode.gets(request_id, kv, blocks, (start, TOKENS), source=pair.prefill.source())
    moved = TOKENS - max(first_token, start)
    assert sum(each.nbytes for each in received) == moved * TOKEN_NBYTES + STATE_NBYTES


async def test_a_group_that_is_wholly_cached_is_not_moved(pair: Pair, request_id: str) -> None:
    kv, _ = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS, paged=False)
    received = await pair.decode.gets(request_id, kv, blocks, (0, TOKENS), source=pair.prefill.source())
    assert sum(each.nbytes for each in received) == STATE_NBYTES


async def test_a_request_that_is_wholly_cached_still_brings_its_metadata(pair: Pair, request_id: str) -> None:
    _, leases = await prefilled(pair, request_id, metadata=b"first token")
    blocks = pair.decode.take(TOKENS, paged=False, state=False)
    expected = pair.decode.snapshot()
    received = await pair.decode.receive(request_id, blocks, source=pair.prefill.source())
    assert not pair.decode.differences(expected)
    assert [(each.nbytes, each.metadata) for each in received] == [(0, b"first token")] * 3
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


async def test_tokens_that_were_never_published_are_an_error_and_not_zeros(pair: Pair, request_id: str) -> None:
    await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS + 1)
    outcomes = await pair.decode.outcomes(request_id, blocks, (0, TOKENS + 1), source=pair.prefill.source())
    codes = {each.code for each in outcomes if isinstance(each, TransferFailed)}
    assert "tokens_unpublished" in codes
    assert codes <= {"tokens_unpublished", "rank_failed", "aborted"}
    assert not any(isinstance(each, Received) for each in outcomes)
