"""The protocol's machines in runs that nobody has tried before, and faults that the simulator has to find.

`STEPWISE_SEED=N` draws the same runs again; `make simulate SEED=n` plays one of them and prints its transcript.
"""

from __future__ import annotations

import os

import planted_book
import planted_keeper
import planted_peers
import planted_reading
import planted_requests
import planted_roster
import planted_session
import planted_source
import pytest
from simulate import WORLDS, Found, for_seconds, played

SEED = int(os.environ["STEPWISE_SEED"])
SECONDS = {
    "source": 2.5, "keeper": 1.0, "requests": 1.5, "book": 1.0, "peers": 1.5, "reading": 1.5, "session": 1.0,
    "roster": 0.5,
}  # fmt: skip
DONE = {
    "source": 1.0, "keeper": 0.4, "requests": 2.0, "book": 1.0, "peers": 1.0, "reading": 1.0, "session": 0.99,
    "roster": 0.99,
}  # fmt: skip
"""Of each run: what it has to do, and does. A keeper that is told to stop is not asked for more."""
FEWEST = 50
"""Runs of each world, whatever the time is that a busy machine leaves for them: of few, all may do too little."""
MOST = 10_000
"""Seeds that a planted fault is looked for in."""
NEAR = {
    "a publish drops what ranks have closed of later leases": 1189,
    "a lease's number is taken for its name": 534,
    "what is whole is read again": 2861,
    "a time to live that begins anew is forgotten": 221,
    "nobody watches a reader that holds slots": 143,
    "an order that is about to end is joined by a lower reservation": 86,
    "an end that was not heard is not told again": 93,
    "the name of weights that nobody waits for is not sent": 657,
    "a publish is sent again that older weights have computed": 971,
    "what waits while the weights are replaced is not cut": 371,
    "a receive that is given up is not aborted": 228,
    "the end of another transfer of the request counts": 55,
}
"""Seeds with which long searches begin; all others are tried after them."""
PLANTED = {
    "source": planted_source.PLANTED,
    "keeper": planted_keeper.PLANTED,
    "requests": planted_requests.PLANTED,
    "book": planted_book.PLANTED,
    "peers": planted_peers.PLANTED,
    "reading": planted_reading.PLANTED,
    "session": planted_session.PLANTED,
    "roster": planted_roster.PLANTED,
}
FAULTS = [pytest.param(world, fault, id=fault) for world, faults in PLANTED.items() for fault in faults]


@pytest.mark.parametrize("world", WORLDS)
def test_whatever_happens_all_holds(world: str) -> None:
    found = for_seconds(world, SEED, SECONDS[world], fewest=FEWEST)
    print(found)
    assert not found.kinds, found
    assert found.ends["done"] > DONE[world] * found.runs, found


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_is_the_same_again(world: str) -> None:
    transcripts = [list[str](), list[str]()]
    for lines in transcripts:
        WORLDS[world](SEED, told=lines.append).run()
    assert transcripts[0] == transcripts[1] != []


@pytest.mark.parametrize(("world", "fault"), FAULTS)
def test_what_is_broken_on_purpose_is_found(monkeypatch: pytest.MonkeyPatch, world: str, fault: str) -> None:
    kind, name, broken = PLANTED[world][fault]
    monkeypatch.setattr(kind, name, broken)
    found = Found(world)
    while not found.kinds and found.runs < MOST:
        played((NEAR.get(fault, 0) + found.runs) % MOST, found)
    assert found.kinds
    ((why, seed),) = found.kinds.items()
    print(f"seed {seed}: {why}")
    assert not why.startswith("TypeError"), "it was found by its own arguments"
    monkeypatch.undo()
    assert not played(seed, Found(world))
