"""Runs of two engines whose daemons meet blows, then none (seeded.py): new ones each time, and what each oracle finds.

`STEPWISE_SEED=N pytest tests/unit/test_seeded.py` plays the same runs again; `python seeded.py --seed N` one of them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from seeded import SEEDS, found_by, quiet

from kvferry.protocol.claims import Claims
from kvferry.protocol.lease import Lease
from kvferry.protocol.leases import Leases
from kvferry.schemas import RankTransfer, TransferState
from kvferryd.engine.session import Session
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics
from kvferryd.paths.source import SourceReader
from kvferryd.peers.peers import Meeting
from kvferryd.transfers.transfer import Transfer
from kvferryd.transfers.work import Work

SEED = int(os.environ["STEPWISE_SEED"])
RUNS = 20


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.timeout(600)
def test_whatever_happens_what_nothing_stands_in_the_way_of_is_done() -> None:
    """Runs that nobody has tried before."""
    rng, ends = random.Random(SEED), Counter[str]()
    for _ in range(RUNS):
        seed = rng.randrange(SEEDS)
        run, kind, about = found_by(seed)
        ends += run.ends
        assert not kind, f"python tests/unit/seeded.py --seed {seed}\n{about}"
    assert ends["done"] > RUNS, ends


async def at_once(*_: Any, **__: Any) -> None:
    """In place of what takes its time."""


async def for_ever(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


def nothing(*_: Any, **__: Any) -> None:
    """In place of what does something."""


def no_effects(*_: Any, **__: Any) -> list[Any]:
    return []


def breaks(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken on purpose")


end = Work._end


def quiet_at_the_end(work: Work, *how: Any) -> None:
    work._of.quiet.set()
    end(work, *how)


def by_one_rank(lease: Lease) -> bool:
    return not lease.more and lease.readers.closed > 0


set_rank = Transfer.set_rank


def whatever_its_end(transfer: Transfer, share: RankTransfer) -> None:
    set_rank(transfer, share.model_copy(update={"state": TransferState.DONE}) if share.state.ended else share)


PLANTED = [
    ("the word of a lease is not looked at", SourceReader, "verify", at_once, "done with torn bytes"),
    (
        "a lease ends when one rank has read it",
        Lease,
        "all_read",
        property(by_one_rank),
        "needless lease_ended: direct",
    ),
    ("a lease never ends", Leases, "_settle", no_effects, "a lease does not end once nobody reads it"),
    ("a peer is used for ever", Meeting, "leave", nothing, "more than may be kept: users of peers"),
    ("a claim is never released", Claims, "release", nothing, "a claim is not held until quiet, or longer"),
    (
        "a transfer that is over keeps its tables",
        Transfer,
        "let_go",
        nothing,
        "more than may be kept: transfers over that hold more than a record",
    ),
    ("blocks are called quiet at the end", Work, "_end", quiet_at_the_end, "a block is written that is not claimed"),
    ("a note of an end breaks", Metrics, "transfer_ended", breaks, "inside a daemon a note broke"),
    ("nobody is told that a drain is over", Ferry, "drain", for_ever, "who waits for a drain is not answered"),
    ("a daemon does not close", Ferry, "close", for_ever, "a daemon does not stop"),
    ("each end is called done", Transfer, "set_rank", whatever_its_end, "a part is called done that is not"),
    ("an engine is not told", Session, "tell", nothing, "an engine is not told of an end"),
]


@pytest.mark.parametrize(
    ("where", "name", "broken", "kind"), [each[1:] for each in PLANTED], ids=[each[0] for each in PLANTED]
)
def test_what_is_broken_on_purpose_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, broken: object, kind: str
) -> None:
    monkeypatch.setattr(where, name, broken)
    seed = next(seed for seed in range(50, 150) if found_by(seed)[1] == kind)  # 58 for the rarest
    monkeypatch.undo()
    assert found_by(seed)[1] != kind
