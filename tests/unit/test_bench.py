"""`kvferry bench`: its table, and its GPU cases, whose oracle agrees with the planner and sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.tables import BlockTable
from kvferryd import bench
from kvferryd.bench.gpu_cases import FULL, POISON, TINY, Case, cases
from kvferryd.bench.gpu_table import COLUMNS, Row, Table
from kvferryd.copy import host, mapped, moves
from kvferryd.plan import bind, plan
from support import refused

# ---- the table that it prints and keeps ----


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def test_a_row_has_rates_and_shares_over_the_whole_and_over_reading(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(None)
    table.ceiling = 400e9
    table.add(Row("mapped", "permuted blocks", 800_000_000, 8e-3, 4e-3, copy_s=2e-3, cpu_s=3e-3, path="mapped"))
    (line,) = capsys.readouterr().out.splitlines()
    row = dict(zip(COLUMNS, cells(line), strict=True))
    assert row == {
        "way": "mapped", "case": "permuted blocks", "MB": "800", "total ms": "8.00", "reading ms": "4.00",
        "copy ms": "2.00", "NIXL ms": "", "GB/s": "100.0", "%": "25.0%", "reading GB/s": "200.0", "reading %": "50.0%",
        "CPU ms": "3.00", "path": "mapped",
    }  # fmt: skip


def test_several_requests_at_once_have_no_rate_of_reading() -> None:
    row = Row("auto", "16 requests at once", 16_000, 2.0, reading_s=1.0, requests=16)
    assert row.rate == 8000
    assert row.reading_rate is None


def test_what_fails_is_a_row_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(tmp_path / "rows.jsonl")
    with table.failing("staged", "NHD to HND"):
        raise KvferryError("way_unavailable", "it is\nnot there")
    with table.failing("staged", "block 16 to 64"):
        raise TimeoutError
    with table.failing("mapped", "block 16 to 64"):
        table.add(Row("mapped", "block 16 to 64", 1000, 1.0))
    table.close()
    lines = capsys.readouterr().out.splitlines()
    assert [len(cells(line)) for line in lines] == [len(COLUMNS)] * 3
    assert "FAILED: way_unavailable: it is not there" in lines[0]
    assert "FAILED: deadline" in lines[1]
    assert table.failures == 2
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["way"] for row in kept] == ["staged", "staged", "mapped"]
    assert kept[2]["rate"] == 1000


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with refused("not_writable", match="cannot be kept"):
        Table(tmp_path / "no" / "rows.jsonl")


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["plan", "--quick"], ["plan", "--case", "TP"], ["--json", "rows.jsonl"]]
)
def test_arguments_that_mean_nothing_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with refused(2, SystemExit):
        bench.main(arguments)
    assert "gpu" in capsys.readouterr().err


# ---- the GPU cases, on host memory ----


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
                with refused("wrong_bytes", match=r"differs|nobody asked"):
                    case.check(ids, rank, pool)
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
