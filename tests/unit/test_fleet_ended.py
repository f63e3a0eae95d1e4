"""The fleet page's sums of ended transfers, kept as transfers come and go, against a walk over all of them."""

from __future__ import annotations

import random

import pytest

from kvferry.proxy import fleet
from kvferry.schemas import ErrorBody, TransferList, TransferRecord, TransferState

ENDED = (TransferState.DONE, TransferState.FAILED, TransferState.ABORTED)
MOST = 50


def walked(kept: list[TransferRecord]) -> dict[str, object]:
    done = sorted(record.took_ms or 0.0 for record in kept if record.state is TransferState.DONE)
    failed = [record.transfer_id for record in kept if record.state is TransferState.FAILED]
    states = [sum(record.state is state for record in kept) for state in ENDED]
    return {"states": states, "bytes": sum(each.bytes for each in kept), "took": done, "failed": failed}


def summed(ended: fleet.Ended) -> dict[str, object]:
    states, took = [ended.states[state] for state in ENDED], [ms for ms, _ in ended.took]
    return {"states": states, "bytes": ended.bytes, "took": took, "failed": list(ended.failed)}


def test_sums_are_those_of_the_transfers_that_are_kept(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REMEMBERED", MOST)
    monkeypatch.setattr(fleet, "WINDOW_S", 300.5)  # none ends at its edge, which moves while the test runs
    daemon = fleet.Daemon(fleet.DaemonRow(url="http://127.0.0.1:1", role="decode", engine="", rank=0))
    told, now = list[TransferRecord](), 1000.0
    for number in range(500):
        now += rng.choice((1.0, 5.0, 30.0))
        state = rng.choice(ENDED)
        record = TransferRecord(
            transfer_id=f"t{number}", request_id="r", engine_id="e", state=state, bytes=rng.randrange(100),
            took_ms=float(rng.randrange(20)), ended_at=now,
            error=ErrorBody(code="deadline", message="late") if state is TransferState.FAILED else None,
        )  # fmt: skip
        told.append(record)
        again = rng.choice(told[:5] if number > 300 else told[-5:])  # as a daemon does that has taken over
        daemon.learn(TransferList(transfers=[record, again], now=now))
        (ended,) = daemon.ended.values()
        kept = [each for each in told if (each.ended_at or 0.0) >= now - fleet.WINDOW_S][-MOST:]
        assert list(ended.records) == [each.transfer_id for each in kept]
        assert summed(ended) == walked(kept)
        said = fleet.record_of([daemon])
        assert [row.transfer_id for row in said.failures] == list(reversed(list(ended.failed)))[: fleet.LISTED]
