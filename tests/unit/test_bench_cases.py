"""The GPU benchmark's cases on host memory: its oracle agrees with the planner, and sees what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.tables import BlockTable
from kvferryd.bench.gpu_cases import FULL, POISON, TINY, Case, cases
from kvferryd.copy import host, mapped, moves
from kvferryd.plan import bind, plan

CASES = [pytest.param(case, id=case.name) for case in cases(TINY, 4)]


def moved(case: Case) -> list[torch.Tensor]:
    """The pools of the destination's ranks after every request, planned and copied as a daemon does."""
    given, taken = case.ids()
    sources = []
    for cache in case.pair.sources():
        sources.append(torch.zeros(cache.nbytes // 4, dtype=torch.int32))
        cache.fill(sources[-1])
    addresses = {(rank, 0): pool.data_ptr() for rank, pool in enumerate(sources)}
    manifests = [cache.manifest("source", "1", "host") for cache in case.pair.sources()]
    pools = []
    for cache in case.pair.destinations():
        pool = torch.full((cache.nbytes // 4,), POISON, dtype=torch.int32)
        chosen = plan(manifests, cache.manifest("destination", "1", "host"))
        for source, destination in zip(given, taken, strict=True):
            tables = {rank: {"full": BlockTable.of(source)} for rank in range(len(sources))}
            bound = bind(chosen, tables, {"full": BlockTable.of(destination)}, (0, case.tokens))
            host.copy(mapped(moves(bound), addresses, {0: pool.data_ptr()}))
        pools.append(pool)
    return pools


@pytest.mark.parametrize("case", CASES)
def test_what_the_planner_moves_is_what_the_oracle_expects(case: Case) -> None:
    ids = case.ids()
    for rank, pool in enumerate(moved(case)):
        case.check(ids, rank, pool)


@pytest.mark.parametrize("case", CASES)
def test_one_wrong_word_is_seen(case: Case) -> None:
    ids, pools = case.ids(), moved(case)
    for rank, pool in enumerate(pools):
        for held in (pool != POISON, pool == POISON):
            found = held.nonzero().flatten()
            if len(found):
                at = int(found[len(found) // 2])
                pool[at] += 1
                with pytest.raises(KvferryError, match=r"differs|nobody asked") as caught:
                    case.check(ids, rank, pool)
                assert caught.value.code == "wrong_bytes"
                pool[at] -= 1


def test_the_full_cases_are_what_the_benchmark_says() -> None:
    by_name = {case.name: case for case in cases(FULL, 4)}
    assert by_name["permuted blocks"].nbytes == 671_088_640
    assert by_name["TP3 to TP1"].nbytes == 671_088_640
    assert [cache.width for cache in by_name["TP3 to TP1"].pair.sources()] == [1, 2, 1]
    for case in by_name.values():
        assert sum(cache.nbytes for cache in case.pair.sources()) < 1.5e9
        for side in case.ids():
            used = np.concatenate(side)
            assert len(set(used.tolist())) == len(used)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_no_word_of_a_source_stands_for_another(tp: int) -> None:
    case = next(case for case in cases(TINY, 4) if case.pair.source.tp == tp)
    pools = []
    for cache in case.pair.sources():
        pools.append(torch.zeros(cache.nbytes // 4, dtype=torch.int32))
        cache.fill(pools[-1])
    words = torch.cat(pools)
    assert len(words.unique()) == len(words)
    assert not (words == POISON).any()
