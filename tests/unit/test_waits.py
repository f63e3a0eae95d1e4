"""The waits of a transfer: which is the longest, how it is said, and who else waited for the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.schemas import Awaited, RankTransfer, TransferRecord, TransferState, Wait
from kvferryd.explain.outcome import records_of, same_wait, waited_text
from kvferryd.observe.waits import longest, sentence
from kvferryd.paths.move import MOST, Waits
from kvferryd.peers.peer import MINUTES, PHASES, Figures
from kvferryd.transfers.slow import EVERY_S, Slow

SAID = [
    (Wait(what=Awaited.ORDER, on="router", ms=2000), "waited 2.0 s for the router's order -> let the router"),
    (Wait(what=Awaited.RESERVATION, on="d", ms=20), "waited 20 ms for engine d to reserve blocks -> see that"),
    (
        Wait(what=Awaited.HANDSHAKE, on="h:1", part="screening", ms=1500),
        "waited 1.5 s for the handshake with engine p at h:1, most of it `screening` -> name it in known_peers",
    ),
    (Wait(what=Awaited.LEASE, on="h:1", ms=2000), "waited 2.0 s for the daemon at h:1 to answer -> see whether"),
    (Wait(what=Awaited.PUBLISH, on="h:1", ms=2000), "waited 2.0 s for engine p at h:1 to publish -> see that prefill"),
    (Wait(what=Awaited.FENCE, on="h:1", ms=2000), "waited 2.0 s for the fence of engine p at h:1 -> it had published"),
    (Wait(what=Awaited.SLOT, on="x", ms=2000), "waited 2.0 s for a slot of its staging arena -> raise arena_mb"),
    (Wait(what=Awaited.PACK, on="h:1", ms=2000), "waited 2.0 s for the daemon at h:1 to pack -> see whether its arena"),
    (Wait(what=Awaited.RANK, on="rank 1", ms=2000), "waited 2.0 s for rank 1 of engine d -> see whether that rank's"),
]


@pytest.mark.parametrize(("wait", "said"), SAID, ids=[wait.what.value for wait, _ in SAID])
def test_each_wait_is_one_sentence_with_what_helps(wait: Wait, said: str) -> None:
    assert sentence(wait, "p", "d").startswith(said)
    assert " on rank 3 -> " in sentence(wait, "p", "d", 3)


def test_there_is_a_sentence_for_all() -> None:
    assert [wait.what for wait, _ in SAID] == list(Awaited)


def share(rank: int, took_ms: float | None, *waits: Wait) -> RankTransfer:
    phases_ms = {"total": took_ms or 0.0}
    return RankTransfer(rank=rank, state=TransferState.DONE, took_ms=took_ms, phases_ms=phases_ms, waits=list(waits))


LATE_ORDER, PUBLISH = Wait(what=Awaited.ORDER, on="router", ms=700), Wait(what=Awaited.PUBLISH, on="h:1", ms=900)


@pytest.mark.parametrize(
    ("slowest", "own", "what", "ms"),
    [
        (share(0, 1000, PUBLISH), share(0, 1000, PUBLISH), Awaited.PUBLISH, 900),
        (share(1, 1000, PUBLISH), share(0, 100), Awaited.PUBLISH, 900),
        (share(1, 1000, LATE_ORDER), share(0, 100), Awaited.RANK, 900),
        (share(1, 800), share(0, 790, LATE_ORDER), Awaited.ORDER, 700),
        (share(1, None), share(0, 100), None, 0),
        (share(0, 5), share(0, 5), None, 0),
    ],
)
def test_the_longest_wait_is_of_the_slowest_rank_or_for_it(
    slowest: RankTransfer, own: RankTransfer, what: Awaited | None, ms: float
) -> None:
    found = longest(slowest, own, 1e9)
    assert (found and found.what, found.ms if found else 0) == (what, ms)


def test_waits_for_one_thing_add_up_and_the_longest_are_kept() -> None:
    now = began = 100.0
    waits = Waits(now)

    def wait(seconds: float, on: str) -> None:
        nonlocal now
        waits.turn(Awaited.PUBLISH, now)
        now += seconds
        if waits.turn(None, now):
            waits.keep(Awaited.PUBLISH, on)

    for on in range(2 * MOST):
        wait(1 + on, str(on))
        wait(1e-5, "no wait at all")
    wait(100, "15")
    told = waits.told(1e9, began)
    assert [each.on for each in told] == [str(on) for on in reversed(range(MOST, 2 * MOST))]
    assert told[0].ms == pytest.approx(116e3)
    assert told[0].began_at == pytest.approx(1e9 + sum(range(1, 16)), abs=0.01)


def test_slow_transfers_have_a_line_in_a_while() -> None:
    now = 0.0
    slow = Slow(1000, lambda: now)
    assert [slow.says(ms) for ms in (1000, 1001, 2000, 2000, 5)] == [None, 0, None, None, None]
    now = EVERY_S
    assert [slow.says(ms) for ms in (1001, 1001)] == [2, None]
    assert Slow(0, lambda: now).says(1e9) is None


def test_a_peers_worst_times_are_those_of_the_last_minutes() -> None:
    figures = Figures()
    assert figures.worst_ms() == ()
    for ms in (30.0, 5.0):
        figures.add(dict.fromkeys(PHASES, ms) | {"pack": 1.0})
    assert dict(zip(PHASES, figures.worst_ms(), strict=True)) == dict.fromkeys(PHASES, 30.0) | {"pack": 1.0}
    (minute,) = figures.worst
    figures.worst[minute - MINUTES] = figures.worst.pop(minute)
    assert figures.worst_ms() == ()
    for earlier in range(2 * MINUTES):
        figures.worst[minute - MINUTES - earlier] = (9.0,) * len(PHASES)
        figures.add(dict.fromkeys(PHASES, 2.0))
    assert figures.worst_ms() == (2.0,) * len(PHASES)
    assert len(figures.worst) <= MINUTES


def record(name: str, began_at: float, on: str = "h:1", what: Awaited = Awaited.LEASE) -> TransferRecord:
    wait = Wait(what=what, on=on, began_at=began_at, ms=2000)
    return TransferRecord(
        transfer_id=f"id-of-{name}", request_id=name, engine_id="d", state=TransferState.DONE, waited_longest=wait,
        why_slow="waited",
    )  # fmt: skip


RECORDS = [
    record("req-1", 100), record("req-2", 102.5), record("req-3", 104), record("req-4", 100, on="h:2"),
    record("req-5", 100, what=Awaited.PUBLISH), record("other", 97.5),
]  # fmt: skip


def test_others_that_waited_for_the_same_in_that_second_are_named() -> None:
    assert same_wait(RECORDS[0], RECORDS) == ["req-2", "other"]
    assert waited_text(RECORDS[0], RECORDS) == "waited; others of that second: req-2, other"
    many = [record(f"r{number}", 100) for number in range(7)]
    assert waited_text(many[0], many) == "waited; others of that second: r1, r2, r3, r4 and 2 more"
    assert waited_text(RECORDS[3], RECORDS) == "waited"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("req-1", ["req-1"]),
        ("id-of-req-2", ["req-2"]),
        ("oth", ["other"]),
        ("id-of-o", ["other"]),
        ("req", ["req-1", "req-2", "req-3", "req-4", "req-5"]),
        ("", []),
        ("eq-1", []),
    ],
)
def test_a_transfer_is_found_by_how_its_ids_begin(wanted: str, found: Sequence[str]) -> None:
    assert [each.request_id for each in records_of(wanted, RECORDS)] == found
