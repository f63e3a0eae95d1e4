"""Every pair of a state and an event comes about in the worlds' runs, or is tried here on copies of their machines:
words of others break no machine, and an answer that nothing has asked for raises, as a name does that is given twice.
"""

from __future__ import annotations

from collections import Counter

import pytest
from simulate import WORLDS, Found, played
from table import ROWS, Pair, Row, Tried, watched

from kvferry.errors import KvferryError

SEEDS = 40  # 30 and 100 meet the same states


@pytest.fixture(scope="module")
def tried() -> Tried:
    """The same runs twice: what they do not bring about is tried the second time."""
    tried = Tried(Counter())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KvferryError, "__deepcopy__", lambda error, _: error, raising=False)
        for pairs in (tried.hit, Counter[Pair]()):
            tried.trying = pairs is not tried.hit
            with watched(pairs, tried):
                for world in WORLDS:
                    for seed in range(SEEDS):
                        assert not played(seed, Found(world))
    return tried


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.about)
def test_every_pair_comes_about_or_is_refused(row: Row, tried: Tried) -> None:
    states = {state for about, state, _ in (*tried.hit, *tried.tried) if about == row.about}
    for state in states:
        for kind in row.events:
            pair = row.about, state, kind.__name__
            if tried.hit[pair]:
                continue
            assert tried.tried[pair], f"nothing has tried {pair}"
            if row.must_raise(state, kind):
                assert pair in tried.raised, f"{pair} answers nothing, and is taken"
            else:
                assert pair not in tried.raised, f"{pair} breaks the machine: {tried.raised[pair]}"
