"""The file of the history: what a daemon writes the next one reads, and garbage harms neither."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import KvferryError
from kvferry.file import File
from kvferry.schemas import ErrorBody, FailedRequest, MarkKind, RankTransfer, TransferRecord, TransferState
from kvferryd.observe import history
from kvferryd.observe.failures import Failures
from kvferryd.observe.history import DAY_S, OTHER, PEERS, RECORDS, History, opened
from support import refused

MINUTE, DAY = 60, 86_400


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1_800_000_000.0)
    monkeypatch.setattr(history.time, "time", clock)
    return clock


@pytest.fixture
def file() -> File:
    return File(os.memfd_create("history"))


def again(file: File, because: str = "") -> History:
    """As the next daemon opens it."""
    return History(*File.copies([file.fileno()]), because)


def told(kept: History, *asked: float, **more: bool) -> Any:
    kept.flush()
    return kept.told(*asked, **more)  # type: ignore[arg-type]


def share(ms: float = 10.0, code: str = "", nbytes: int = 1000) -> RankTransfer:
    state = TransferState.FAILED if code else TransferState.DONE
    error = ErrorBody(code=code, message="m") if code else None
    return RankTransfer(rank=0, state=state, bytes=nbytes, phases_ms={"total": ms + 5, "waiting": 5.0}, error=error)


def record(name: str, state: TransferState = TransferState.DONE, **more: Any) -> TransferRecord:
    return TransferRecord(transfer_id=name, request_id=f"r-{name}", engine_id="d", state=state, created_at=1.0, **more)


def test_figures_of_one_daemon_go_on_in_the_next(file: File, clock: Clock) -> None:
    first = again(file)
    for ms in range(1, 101):
        first.ended(share(ms), "p")
    first.ended(share(code="deadline"), "q")
    first.served("r", 77)
    first.flush()
    second = again(file)
    second.ended(share(code="deadline"), "q")
    second.ended(share(code="torn"), "")
    (point,), _, peers = told(second, 3600, MINUTE, 0, peers=True)
    assert (point.done, point.failed, point.read_bytes, point.served_bytes) == (100, 3, 100_000, 77)
    assert point.failures == {"deadline": 2, "torn": 1}
    assert point.p50_ms == pytest.approx(50, rel=1 / 8) and point.p99_ms == pytest.approx(99, rel=1 / 8)
    assert {each.engine_id: (each.done, each.failed, each.served_bytes) for each in peers} == {
        "p": (100, 0, 0), "q": (0, 2, 0), "r": (0, 0, 77),
    }  # fmt: skip
    assert {each.engine_id: each.failures for each in peers}["q"] == {"deadline": 2}


def test_a_day_is_kept_by_the_minute_and_five_minutes_by_five_seconds(file: File, clock: Clock) -> None:
    kept, began = again(file), clock.now
    for _ in range(DAY // MINUTE + 10):
        kept.ended(share(), "p")
        clock.now += MINUTE
    points, _, (peer,) = told(kept, DAY, MINUTE, 0, peers=True)
    assert len(points) == peer.done == DAY // MINUTE - 1, "the minute that has just begun has nothing yet"
    assert points[0].at == began + 11 * MINUTE
    assert [each.done for each in told(kept, DAY, 3600, 0)[0]][1:-1] == [60] * 23
    assert [each.at for each in told(kept, DAY, MINUTE, clock.now - 90)[0]] == [clock.now - 120, clock.now - 60]
    whole, lately = told(kept, DAY, 3600, 0)[0], told(kept, DAY, 3600, clock.now - 90)[0]
    assert lately == whole[-1:], "a point of several minutes is told whole"
    kept.ended(share(), "p")
    clock.now += 5
    kept.ended(share(), "p")
    assert [(each.at - clock.now, each.done) for each in told(kept, 300, 5, 0)[0]][-2:] == [(-5, 1), (0, 1)]


def test_the_65th_peer_of_a_day_counts_with_the_others_and_has_a_place_on_the_next(file: File, clock: Clock) -> None:
    kept = again(file)
    for number in range(PEERS + 2):
        kept.ended(share(), f"p{number}")
    peers = {each.engine_id: each.done for each in told(kept, DAY, MINUTE, 0, peers=True)[2]}
    assert peers.pop(OTHER) == 2 and len(peers) == PEERS
    clock.now += DAY
    kept = again(file)
    kept.ended(share(), "late")
    assert [each.engine_id for each in told(kept, DAY - MINUTE, MINUTE, 0, peers=True)[2]] == ["late"]


def test_a_transfer_without_an_end_has_died_with_its_daemon(file: File, clock: Clock) -> None:
    first = again(file)
    ids = {"transfer_id": "b", "request_id": "r-b", "engine_id": "d", "state": "waiting", "slowest_rank": 1}
    for name in "ab":
        first.began(ids | {"transfer_id": name, "request_id": f"r-{name}"})
    first.over("a", record("a").model_dump_json().encode())
    first.began(ids | {"source": {"engine_id": "p", "address": "h:1"}})
    second = again(file, "it was ended by SIGKILL")
    assert [(each.request_id, each.state) for each in second.earlier] == [("r-a", "done"), ("r-b", "failed")]
    died = TransferRecord.model_validate_json(second.earlier[1].body)
    assert died.error is not None and died.error.code == "daemon_died" and "SIGKILL" in died.error.message
    assert (died.ended_at, died.ranks[0].rank, died.source and died.source.engine_id) == (clock.now, 1, "p")
    (point,), marks, (peer,) = told(second, 300, 5, 0, peers=True)
    assert point.failures == peer.failures == {"daemon_died": 1} and peer.engine_id == "p"
    assert [mark.kind for mark in marks] == [MarkKind.START, MarkKind.DEATH, MarkKind.START]
    assert marks[1].why == "it was ended by SIGKILL"
    second.close()
    third = again(file, "it was upgraded")
    assert [each.body for each in third.earlier] == [each.body for each in second.earlier], "told once"
    assert [mark.kind for mark in told(third, 300, 5, 0)[1]][-2:] == [MarkKind.STOP, MarkKind.UPGRADE]


def test_a_failure_counts_for_five_minutes_in_the_next_daemon_too(file: File, clock: Clock) -> None:
    first = again(file)
    error = ErrorBody(code="deadline", message="m")
    for name, earlier_s in (("a", 301.0), ("b", 100.0), ("c", 10.0)):
        at = clock.now - earlier_s
        first.over(name, record(name, TransferState.FAILED, error=error, ended_at=at).model_dump_json().encode())
    first.over("d", record("d", ended_at=clock.now).model_dump_json().encode())
    lately = again(file).failures.lately()
    assert lately is not None and lately.failed == 2
    assert (lately.last.transfer_id, lately.last.error) == ("c", error)
    clock.now += 250
    lately = again(file).failures.lately()
    assert lately is not None and (lately.failed, lately.last.transfer_id) == (1, "c")
    clock.now += 60
    assert again(file).failures.lately() is None


def test_the_last_records_are_kept_and_long_ones_are_whole(file: File) -> None:
    kept = again(file)
    many = [RankTransfer(rank=rank, state=TransferState.DONE, phases_ms={"total": rank / 7}) for rank in range(40)]
    kept.began({"transfer_id": "lasts", "request_id": "r", "engine_id": "d", "state": "waiting"})
    for number in range(RECORDS):
        kept.over(f"{number}", record(f"{number}", ranks=many if number == 500 else []).model_dump_json().encode())
    kept.over("lasts", record("lasts").model_dump_json().encode())
    bodies = [TransferRecord.model_validate_json(each.body) for each in again(file).earlier]
    assert [each.transfer_id for each in bodies] == [*map(str, range(1, RECORDS)), "lasts"]
    assert bodies[499].ranks == many
    noise = ErrorBody(code="c", message="".join(random.Random(1).choices("abcdefghij\u00e9\U0001f600", k=3000)))
    kept.over("hopeless", record("hopeless", error=noise).model_dump_json().encode())
    assert len(again(file).earlier) == RECORDS - 1


def test_it_takes_no_more_than_20_mb_with_64_peers(file: File, clock: Clock) -> None:
    assert again(file).nbytes == os.fstat(file.fileno()).st_size < 20e6
    assert DAY_S == DAY


def test_the_state_folder_is_for_one_daemon(tmp_path: Path) -> None:
    first = opened(tmp_path / "state")
    first.ended(share(), "p")
    with pytest.raises(KvferryError, match="another daemon"):
        opened(tmp_path / "state")
    first.close()
    assert told(opened(tmp_path / "state"), 300, MINUTE, 0)[0][0].done == 1
    (tmp_path / "file").touch()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "history")
    for name in ("file", "pipe"):
        with refused("bad_config", field="state"):
            opened(tmp_path / name)


def test_a_disk_that_fails_stops_nothing(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = again(file)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    kept.began({"transfer_id": "a"})
    kept.over("a", b"{}")
    kept.ended(share(), "p")
    kept.flush()
    kept.mark(MarkKind.DRAIN, "w" * 5000)


def used(kept: History) -> None:
    kept.ended(share(code="torn"), "p")
    kept.served("r", 1)
    kept.over("a", record("a").model_dump_json().encode())
    told(kept, DAY, 300, 0, peers=True)
    told(kept, 300, 5, 0)
    kept.close()


def test_garbage_is_skipped(rng: random.Random, clock: Clock) -> None:
    """Any bytes anywhere, under a head that is whole and under one that is not; a file of any length."""
    written = File(os.memfd_create("written"))
    kept = again(written)
    for number in range(80):
        kept.ended(share(number, "torn" if number % 3 else ""), f"p{number}")
        kept.began({"transfer_id": f"{number}", "request_id": "r", "engine_id": "d", "state": "waiting"})
    kept.flush()
    whole = os.pread(written.fileno(), kept.nbytes, 0)
    for _ in range(30):
        file = File(os.memfd_create("garbage"))
        os.write(file.fileno(), whole)
        for _ in range(rng.randrange(60)):
            nbytes = rng.choice((1, 8, 100, 4096, 100_000))
            os.pwrite(file.fileno(), rng.randbytes(nbytes), rng.choice((26, 4096, 5000, 24_000, 2_000_000, 3_000_000)))
        if rng.random() < 0.3:
            os.ftruncate(file.fileno(), rng.randrange(kept.nbytes))
        used(again(file))
        used(again(file, "it was ended by SIGKILL"))


def test_another_layout_is_begun_anew(file: File) -> None:
    used(again(file))
    os.pwrite(file.fileno(), b"kvferry history 0\n", 0)
    kept = again(file)
    assert (kept.earlier, told(kept, DAY, MINUTE, 0)[0]) == ((), [])


# ---- the failures that a daemon counts, and the last one of each engine ----


def test_the_last_failure_of_an_engine_is_the_one_that_ended_last_however_they_are_noted() -> None:
    """Records of the daemon before come in the order in which they began."""
    failures, now = Failures(), time.time()
    for request_id, ago_s in (("late", 10.0), ("early", 60.0)):
        error = ErrorBody(code="deadline", message="the deadline passed", field="", value="", remedy="")
        failures.note(
            FailedRequest(at=now - ago_s, request_id=request_id, transfer_id="t", engine_id="source", error=error)
        )
    assert [each.request_id for each in failures.of_engines()] == ["late"]
    lately = failures.lately()
    assert lately is not None and (lately.failed, lately.last.request_id) == (2, "late")
