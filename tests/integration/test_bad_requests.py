"""Misuse of the blocks of a request is refused with a reason, and the daemon lives on."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from fleet import refusal, until
from pair import Pair
from ranks import Blocks
from victim import Victim

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState
from kvferry.v1 import engine_pb2, layout_pb2
from kvferry.wire import tables_to_proto
from support import refused

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("unharmed", "lives_on")]


PUBLISHES: dict[str, tuple[dict[str, Any], str]] = {
    "no number of the lease": ({"lease": 0}, "number_required"),
    "a number beyond counting": ({"lease": 1 << 53}, "number_required"),
    "no request id": ({"request_id": ""}, "malformed_request_id"),
    "an endless request id": ({"request_id": "x" * 257}, "malformed_request_id"),
    "fewer than no tokens": ({"num_tokens": -1}, "malformed_tables"),
    "more tokens than blocks": ({"num_tokens": 33}, "tables_too_short"),
    "tokens beyond counting": ({"num_tokens": (1 << 63) - 1}, "tables_too_short"),
    "a block out of range": ({"ids": [1, 32]}, "block_id_out_of_range"),
    "a negative block": ({"ids": [1, -1]}, "block_id_out_of_range"),
    "more blocks than there are": ({"ids": [1] * 33}, "tables_too_long"),
    "a negative first token": ({"first_token": -1}, "malformed_tables"),
    "an unknown group": ({"group": "x" * 100}, "unknown_group"),
    "too much metadata": ({"metadata": b"x" * (64 * 1024 + 1)}, "metadata_too_large"),
    "a time to live that is no number": ({"ttl_s": math.nan}, "malformed_seconds"),
    "an endless time to live": ({"ttl_s": math.inf}, "malformed_seconds"),
    "a time to live in the past": ({"ttl_s": -1.0}, "malformed_seconds"),
}


@pytest.mark.parametrize(("change", "code"), PUBLISHES.values(), ids=PUBLISHES.keys())
async def test_a_publish_that_makes_no_sense_is_refused(victim: Victim, change: dict[str, Any], code: str) -> None:
    error = await refused_command(victim, publish=publishing(**change))
    assert error.code == code, error


async def refused_command(victim: Victim, **command: Any) -> KvferryError:
    """The daemon's answer to a command that no client of ours would send."""
    with pytest.raises(KvferryError) as caught:
        await victim.engine.ranks[0].client._ask(**command)
    return caught.value


def publishing(
    *, ids: list[int] | None = None, first_token: int = 0, group: str = "", **more: Any
) -> engine_pb2.PublishRequest:
    tables = {
        "full": layout_pb2.BlockTable(block_ids=[1, 2] if ids is None else ids, first_token=first_token),
        "state": layout_pb2.BlockTable(block_ids=[1]),
    }
    if group:
        tables[group] = layout_pb2.BlockTable()
    told = {"request_id": "bad", "num_tokens": 20, "lease": 1} | more
    return engine_pb2.PublishRequest(tables=layout_pb2.Tables(groups=tables), **told)


async def test_a_refusal_is_heard_however_much_was_wrong(victim: Victim) -> None:
    request = publishing()
    for n in range(1000):  # more than a manifest may have are refused before they are read
        request.tables.groups[f"{n}-{'x' * 90}"].first_token = 0
    error = await refused_command(victim, publish=request)
    assert error.code == "unknown_group", error


async def test_what_was_published_is_not_changed_afterwards(victim: Victim, request_id: str) -> None:
    client, tables = victim.engine.ranks[0].client, Blocks((1, 2), 1).tables()
    lease = await client.publish(request_id, tables, 20, more=True)
    assert (await refusal(client.publish(request_id, tables, 19))).code == "published_less"
    await client.publish(request_id, tables, 20)
    assert (await refusal(client.publish(request_id, tables, 21))).code == "already_published"
    await client.abort(request_id)
    assert await lease.ended() is LeaseState.REVOKED


RECEIVES: dict[str, tuple[dict[str, Any], str]] = {
    "no request id": ({"request_id": ""}, "malformed_request_id"),
    "a block named twice": ({"ids": (1, 1)}, "duplicate_block"),
    "a block out of range": ({"ids": (1, 99)}, "block_id_out_of_range"),
    "too few blocks": ({"tokens": (0, 33)}, "tables_too_short"),
    "a range backwards": ({"tokens": (5, 3)}, "malformed_tables"),
    "a negative range": ({"tokens": (-5, 3)}, "malformed_tables"),
    "a deadline that is no number": ({"deadline_s": math.nan}, "malformed_seconds"),
    "an endless deadline": ({"deadline_s": math.inf}, "malformed_seconds"),
    "a deadline in the past": ({"deadline_s": -1.0}, "malformed_seconds"),
}


@pytest.mark.parametrize(("change", "code"), RECEIVES.values(), ids=RECEIVES.keys())
async def test_a_reservation_that_makes_no_sense_is_refused(victim: Victim, change: dict[str, Any], code: str) -> None:
    told: dict[str, Any] = {"request_id": "bad"} | change
    blocks = Blocks(told.pop("ids", (1, 2)), 3)
    with refused(code):
        await victim.engine.ranks[0].client.receive(told.pop("request_id"), blocks.tables(), **told)


async def test_a_request_reserves_one_set_of_blocks(victim: Victim, request_id: str) -> None:
    engine = victim.engine
    first = asyncio.create_task(engine.outcomes(request_id, engine.take(20), attempt=1))

    async def reserved() -> object:
        return await victim.router.transfers(request_id)

    await until(reserved, "the reservation arrives")
    tables = tables_to_proto(engine.take(20).tables())
    request = engine_pb2.ReceiveRequest(request_id=request_id, tables=tables, attempt=1)
    assert (await refused_command(victim, receive=request)).code == "receive_conflict"
    assert (await refusal(engine.receive(request_id, engine.take(20)))).code == "receive_pending"
    await engine.ranks[0].client.abort(request_id)
    (outcome,) = await first
    assert isinstance(outcome, TransferFailed)
    assert outcome.code == "aborted"


async def test_a_source_table_that_was_cut_short_fails_the_read_and_names_the_group(
    victim: Victim, pair: Pair, request_id: str
) -> None:
    blocks = pair.prefill.take(50)
    cut = Blocks(blocks.ids, None)  # no state was published
    leases = await pair.prefill.publish(request_id, cut, 50)
    with refused("tables_mismatch", TransferFailed) as failed:
        await victim.engine.receive(request_id, victim.engine.take(50), source=pair.prefill.source())
    assert "state" in failed.value.message
    await pair.prefill_routers[0].abort_request(request_id)
    assert [(await lease.ended()).ended for lease in leases] == [True, True]
