"""Nonsense over REST, or in an order, is refused with a reason, and the daemon lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pair import Pair
from ranks import TestEngine
from victim import NOWHERE, SHAPE, Victim, unused_address

from kvferry.engine import TransferFailed
from kvferry.router import DaemonError
from kvferry.schemas import OrderBody, PeerRequest, SourceBody
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("unharmed", "lives_on")]


def table(*ids: Any, first_token: Any = 0) -> dict[str, Any]:
    return {"full": {"block_ids": list(ids), "first_token": first_token}, "state": {"block_ids": [1]}}


def order_with(**change: Any) -> dict[str, Any]:
    source = {"engine_id": "prefill", "address": "127.0.0.1:9"}
    return {"request_id": "bad", "source": source} | change


def wants(tables: Any, token_range: Any = None) -> dict[str, Any]:
    return order_with(destination={"tables": tables, "token_range": token_range})


ORDERS: dict[str, tuple[Any, int, str]] = {
    "no object": ([], 422, "malformed_request"),
    "no request id": ({"source": {"engine_id": "p", "address": "h:1"}}, 422, "malformed_request"),
    "a number for a request id": (order_with(request_id=5), 422, "malformed_request"),
    "an empty request id": (order_with(request_id=""), 422, "malformed_request"),
    "an endless request id": (order_with(request_id="x" * 257), 422, "malformed_request"),
    "a text for a source": (order_with(source="prefill"), 422, "malformed_request"),
    "an address without a port": (order_with(source={"engine_id": "p", "address": "host"}), 422, "malformed_request"),
    "a port that is none": (order_with(source={"engine_id": "p", "address": "h:99999"}), 422, "malformed_address"),
    "an address not allowed": (order_with(source={"engine_id": "p", "address": NOWHERE}), 403, "address_not_allowed"),
    "an unknown field": (order_with(colour="red"), 422, "malformed_request"),
    "a negative deadline": (order_with(deadline_ms=-1), 422, "malformed_request"),
    "a priority that is a text": (order_with(priority="high"), 422, "malformed_request"),
    "an unknown destination": (order_with(destination={"engine_id": "x", "tables": {}}), 404, "unknown_engine"),
    "no tables at all": (wants({}), 422, "tables_mismatch"),
    "a group without a table": (wants({"full": {"block_ids": [1]}}), 422, "tables_mismatch"),
    "an unknown group": (wants(table(1) | {"swa": {"block_ids": [1]}}), 422, "unknown_group"),
    "a list for tables": (wants([1, 2]), 422, "malformed_request"),
    "a list for a table": (wants({"full": [1, 2]}), 422, "malformed_tables"),
    "a text for a block id": (wants(table("1")), 422, "malformed_tables"),
    "a fraction for a block id": (wants(table(1.5)), 422, "malformed_tables"),
    "true for a block id": (wants(table(True)), 422, "malformed_tables"),
    "a block id beyond 64 bits": (wants(table(1 << 70)), 422, "malformed_tables"),
    "a negative block id": (wants(table(-1)), 422, "block_id_out_of_range"),
    "a block id out of range": (wants(table(32)), 422, "block_id_out_of_range"),
    "a block named twice": (wants(table(1, 2, 1)), 422, "duplicate_block"),
    "too few blocks for the tokens": (wants(table(1, 2), (0, 33)), 422, "tables_too_short"),
    "a negative first token": (wants(table(1, first_token=-16)), 422, "malformed_tables"),
    "a first token that is a text": (wants(table(1, first_token="0")), 422, "malformed_tables"),
    "a token range backwards": (wants(table(1), (9, 3)), 422, "malformed_tables"),
    "a token range of one": (wants(table(1), (9,)), 422, "malformed_request"),
    "a negative token": (wants(table(1), (-1, 3)), 422, "malformed_request"),
    "tables of some ranks": (wants({"1": table(1)}), 422, "malformed_tables"),
}


async def test_a_group_that_no_text_can_name_is_refused(victim: Victim) -> None:
    body = wants(table(1) | {"\ud800": {"block_ids": []}})
    answer = await victim.http.post(
        "/v1/transfers", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "malformed_tables"), answer.text


@pytest.mark.parametrize(("body", "status", "code"), ORDERS.values(), ids=ORDERS.keys())
async def test_an_order_that_makes_no_sense_is_refused(victim: Victim, body: Any, status: int, code: str) -> None:
    answer = await victim.http.post("/v1/transfers", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"


# the other side of an order


async def test_an_address_where_nobody_answers_fails_the_handshake_at_once(victim: Victim, request_id: str) -> None:
    with unused_address() as address:
        with refused("peer_unreachable", DaemonError, status=502):
            await victim.router.prewarm(PeerRequest(engine_id="prefill-b", address=address))
        source = SourceBody(engine_id="prefill-b", address=address)
        with refused("peer_unreachable", TransferFailed) as failed:
            await victim.engine.receive(request_id, victim.engine.take(10), source=source)
    assert address in failed.value.message


async def test_a_port_that_speaks_something_else_fails_the_handshake(victim: Victim, pair: Pair) -> None:
    rest_port = pair.prefill.daemons[0].url.removeprefix("http://")
    with pytest.raises(DaemonError) as caught:
        await victim.router.prewarm(PeerRequest(engine_id="prefill-b", address=rest_port))
    assert caught.value.code in ("peer_unreachable", "rpc_failed", "protocol")


async def test_an_engine_that_the_other_daemon_does_not_have_is_named(victim: Victim, pair: Pair) -> None:
    with refused("unknown_engine", DaemonError, status=404) as caught:
        await victim.router.prewarm(PeerRequest(engine_id="nobody", address=pair.prefill.address))
    assert "nobody" in caught.value.message


async def test_an_address_that_is_not_allowed_is_not_dialled(victim: Victim, request_id: str) -> None:
    source = SourceBody(engine_id="prefill", address=NOWHERE)
    for attempt in (
        victim.router.order(OrderBody(request_id=request_id, source=source)),
        victim.router.prewarm(PeerRequest(engine_id="prefill-b", address=NOWHERE)),
        victim.engine.receive(request_id, victim.engine.take(1), source=source),
    ):
        with refused("address_not_allowed"):
            await attempt


async def test_an_engine_of_another_model_is_refused_with_both_values(
    victim: Victim, far: DaemonService, request_id: str
) -> None:
    stranger = await TestEngine.start("stranger", [far], SHAPE, fingerprint="another model")
    _, blocks = stranger.filled(10)
    await stranger.publish(request_id, blocks, 10)
    with pytest.raises(DaemonError) as caught:
        await victim.router.prewarm(PeerRequest(engine_id="stranger", address=stranger.address))
    assert caught.value.status == 422
    with pytest.raises(TransferFailed) as failed:
        await victim.engine.receive(request_id, victim.engine.take(10), source=stranger.source())
    for error in (caught.value, failed.value):
        (why,) = error.refusals
        assert (why.code, why.destination) == ("fingerprint", "f")
        assert why.source.startswith("another model")
    await stranger.ranks[0].client.abort(request_id)
    await stranger.close()


async def test_an_order_that_came_to_the_daemon_of_its_source_is_refused_at_once(
    victim: Victim, request_id: str
) -> None:
    with refused("own_engine", DaemonError, status=422, value="victim") as caught:
        await victim.router.order(OrderBody(request_id=request_id, source=victim.engine.source()))
    assert "order at a daemon of the engine that receives" in caught.value.remedy


async def test_an_engine_does_not_read_from_itself(victim: Victim, request_id: str) -> None:
    with pytest.raises(DaemonError) as caught:
        await victim.router.prewarm(PeerRequest(engine_id="victim", address=victim.daemon.peer))
    with pytest.raises(TransferFailed) as failed:
        await victim.engine.receive(request_id, victim.engine.take(40), source=victim.engine.source())
    assert caught.value.code == failed.value.code == "own_engine"
