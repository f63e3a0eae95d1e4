"""The two state machines: every legal move, and that every other one raises."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref

import numpy as np
import pytest

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.protocol.attempts import Attempt
from kvferry.protocol.session_events import Rank
from kvferry.protocol.states import LEASE, TRANSFER, IllegalMove, moved
from kvferry.schemas import LeaseState as L
from kvferry.schemas import RankTransfer
from kvferry.schemas import TransferState as T
from kvferry.v1 import peer_pb2
from kvferryd.config import Config
from kvferryd.copy.sums import Sums
from kvferryd.engine import Engine
from kvferryd.engine.membership import Membership
from kvferryd.engine.session import Session
from kvferryd.leases.leases import Leases
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.peers import Peers
from kvferryd.transfers import transfer
from kvferryd.transfers.order import Order
from kvferryd.transfers.record import json_of
from kvferryd.transfers.transfer import Transfer
from kvferryd.transfers.work import Surroundings
from kvferryd.transport.agent import Agent


@pytest.mark.parametrize(("start", "to"), [*itertools.product(T, T), *itertools.product(L, L)])
def test_no_other_move_than_those_of_the_tables_is_made(start: T | L, to: T | L) -> None:
    table = TRANSFER if isinstance(start, T) else LEASE
    if to in table[start]:  # type: ignore[index]
        assert moved(start, to) is to
    else:
        with pytest.raises(IllegalMove, match=f"{start.value} -> {to.value}"):
            moved(start, to)


@pytest.mark.parametrize(("table", "states"), [(TRANSFER, T), (LEASE, L)])
def test_a_state_has_ended_when_no_move_is_left(table: object, states: type[T] | type[L]) -> None:
    for state in states:
        assert (not table[state]) is state.ended  # type: ignore[arg-type]


def test_done_is_reached_through_verifying_only() -> None:
    assert [state for state, moves in TRANSFER.items() if T.DONE in moves] == [T.VERIFYING]


def test_a_wait_that_spans_two_states_is_booked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the first chunk of a prefill ends before what is wanted."""
    clock = [100.0]
    monkeypatch.setattr(transfer.time, "monotonic", lambda: clock[0])
    course = transfer.Course()

    def after(seconds: float) -> None:
        clock[0] += seconds

    after(1.0)
    course.leave(T.WAITING, clock[0])
    course.await_publish(clock[0], awaited=True)
    after(2.0)
    course.leave(T.CONNECTING, clock[0])
    assert course.unpublished_since == clock[0], "nothing came since then"
    after(0.5)
    course.await_publish(clock[0], awaited=False)
    after(0.25)
    course.leave(T.READING, clock[0])
    course.end()
    assert course.ms == {"waiting": 1e3, "connecting": 0, "waiting_publish": 2.5e3, "reading": 250, "total": 3.75e3}


def a_manifest() -> Manifest:
    memory = np.zeros((2, 4), dtype=np.uint16)
    builder = ManifestBuilder("decode", "1", ModelInfo(name="m", fingerprint="f"))
    builder.region(0, "host", nbytes=memory.nbytes, address=memory.ctypes.data)
    builder.group("full", num_blocks=2, block_size=4)
    builder.component("full", layer=0, name="k", array=memory, axes=("block", "slot"))
    return builder.build()


def an_engine() -> Engine:
    session, leases = Session(Rank("decode", "1", 0, 1)), Leases("decode", "1", print, 1)
    return Engine(session, Membership(session.rank, {}), a_manifest(), Agent("never started"), b"", leases, Sums())


@pytest.mark.anyio
async def test_the_deadline_counts_from_the_order_unless_the_engine_alone_gave_one() -> None:
    config, engine, loop = Config(), an_engine(), asyncio.get_running_loop()
    around = Surroundings(
        config, Peers(config, Metrics()), lambda it, _: None, lambda it: None, lambda work: work.close()
    )
    for of_engine, of_order in ((None, None), (None, 5.0), (5.0, None), (5.0, 7.0)):
        transfer = Transfer(engine, "r", Attempt(1), around, of_engine)
        reserved_until, ordered_at = transfer.deadline, loop.time()
        transfer.take_order(Order("source", "127.0.0.1:1", deadline_s=of_order), peer_pb2.Reader())
        if of_order is None and of_engine is not None:
            assert transfer.deadline == reserved_until
        else:
            assert transfer.deadline >= ordered_at + (of_order or config.deadline_s)
        transfer.stop(T.ABORTED, KvferryError("aborted", "at once"))
        await transfer.ended.wait()


@pytest.mark.anyio
async def test_a_transfer_that_is_stopped_before_its_first_step_still_ends() -> None:
    config, metrics = Config(), Metrics()
    engine = an_engine()
    ended: list[Transfer] = []
    around = Surroundings(
        config, Peers(config, metrics), lambda it, _: ended.append(it), lambda it: None, lambda work: work.close()
    )
    transfer = Transfer(engine, "r", Attempt(1), around)
    transfer.stop(T.ABORTED, KvferryError("aborted", "at once"))
    async with asyncio.timeout(60):
        await transfer.ended.wait()
    await asyncio.sleep(0)  # its owner is told after its engine
    assert (transfer.state, ended, transfer.quiet.is_set()) == (T.ABORTED, [transfer], True)

    told = json_of(transfer)
    assert json_of(transfer) is told, "many may look, and nothing has changed"
    transfer.set_rank(RankTransfer(rank=1, state=T.READING))
    assert b'"rank":1' in json_of(transfer)

    kept = weakref.ref(engine)
    del engine
    gc.collect()
    assert kept() is None, "the history has records, and no engines that are gone"
