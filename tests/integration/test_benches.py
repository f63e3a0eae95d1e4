"""The benches that replay other people's rules, small and real: they run to their end, and every byte arrives.

`conversation_trace.jsonl` has the first 60 requests of the conversation trace of Mooncake (FAST 2025 release,
github.com/kvcache-ai/Mooncake, Apache-2.0), without output_length and hash_ids.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvferryd import bench
from kvferryd.bench import cost, paged, trace
from support import refused

TRACE = Path(__file__).with_name("conversation_trace.jsonl")


def tables(text: str) -> list[list[dict[str, str]]]:
    return [rows(part) for part in text.split("\n\n") if "|" in part]


def rows(text: str) -> list[dict[str, str]]:
    """The table of a bench: one dict for each line behind its head."""
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    )
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_a_trace_is_replayed_beside_an_ideal_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["trace", str(TRACE), "--device", "cpu", "--speed", "10", "20", "--seconds", "1"]) == 0
    said = capsys.readouterr().out
    assert (whole := re.search(r"([\d,]+) whole blocks hold what the source published", said))
    assert int(whole[1].replace(",", "")) > 1000
    every = trace.read(TRACE, seed=67)
    requests, parts = tables(said)
    for speed, row, part in zip((10, 20), requests, parts, strict=True):
        assert row["speed"] == str(speed)
        assert row["requests"] == str(sum(each.at_s < speed for each in every))
        assert row["failed"] == "0"
        assert float(row["shared link p50"]) > 0
        assert part["speed"] == row["speed"]
        assert float(part["publish"]) > 0 < float(part["reading"]) < float(row["p99 ms"])


def test_arrivals_lie_in_their_batch_and_come_from_the_seed() -> None:
    one, same, other = (trace.read(TRACE, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert min(one).at_s >= 0
    first = [each for each in one if each.size in (6758, 7322, 7236)]
    assert all(each.at_s < trace.BATCH_S for each in first)
    assert trace.faster(one, 2, 1e9) == [trace.Arrival(each.at_s / 2, each.size) for each in one]


def test_a_shared_link_gives_each_its_part() -> None:
    arrivals = [trace.Arrival(0.0, 100), trace.Arrival(0.5, 25), trace.Arrival(10.0, 50)]
    # Alone until 0.5 (50 bytes), then half of 100 a second each: the second ends at 1.0, the first at 1.25.
    assert trace.shared(arrivals, 100.0) == pytest.approx([1.25, 0.5, 0.5])
    assert trace.one_by_one(arrivals, 100.0) == pytest.approx([1.0, 0.75, 0.5])


def test_both_links_are_busy_for_as_long() -> None:
    rng = np.random.default_rng(3)
    at_s, sizes = np.sort(rng.uniform(0, 90, 200)).tolist(), rng.integers(1, 100, 200).tolist()
    arrivals = [trace.Arrival(*each) for each in zip(at_s, sizes, strict=True)]
    ends = [
        max(each.at_s + s for each, s in zip(arrivals, link(arrivals, 100.0), strict=True))
        for link in (trace.shared, trace.one_by_one)
    ]
    assert ends[0] == pytest.approx(ends[1])


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "no.jsonl").write_text('{"timestamp": 0}\n')
    with refused("malformed", match="cannot be read"):
        trace.read(path, 0)


def test_pages_are_moved_by_kvferry_and_by_nixl_beside_a_bulk_copy(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--tokens 1000 --pages 16 --layers 2 --batch 1 3 64 --pool-gib 0.05"
    assert bench.main(["paged", "--device", "cpu", "--quick", *small.split()]) == 0
    said = capsys.readouterr().out
    assert "every word that was asked for has arrived, and no other" in said
    found = [(row["preset"], row["batch"], row["pages"], row["MB"], row["path"]) for row in rows(said)]
    assert found == [
        ("mla", "1", "126", "1", "direct"), ("mla", "3", "378", "4", "direct"),
        ("gqa", "1", "126", "4", "direct"), ("gqa", "3", "378", "12", "direct"),
    ]  # fmt: skip
    assert all(float(row[f"NIXL {op} ms"]) > 0 for row in rows(said) for op in ("read", "write"))


def test_a_bench_of_pages_has_the_sizes_of_its_rules() -> None:
    mla = paged.Point("mla", 61, 8192, 16, (1, 16))
    assert (mla.pages, mla.page_nbytes, mla.nbytes) == (31_232, 11_264, 351_797_248)
    assert mla.pool_pages == 20 * 512 + 8
    gqa = paged.Point("gqa", 94, 8192, 16, (1,))
    assert (gqa.pages, gqa.page_nbytes, gqa.pool_pages) == (48_128, 32 << 10, 2 * 512 + 8)


def test_batches_without_room_are_left_out() -> None:
    point = paged.Point("gqa", 94, 8192, 16, (1, 4, 16))
    assert point.within(32 << 30) == point
    assert point.within(10 << 30) == paged.Point("gqa", 94, 8192, 16, (1, 4))
    assert point.within(1) is None


def test_each_request_of_a_batch_has_pages_of_its_own_by_the_seed() -> None:
    case = paged.Point("mla", 1, 1000, 16, (1, 4)).case(4)
    for side in case.ids():
        assert len(set(np.concatenate(side).tolist())) == 4 * 63
    assert np.array_equal(case.ids(), case.ids())


def test_a_daemon_is_looked_at_at_rest_and_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["cost", "--device", "cpu", "--quick"]) == 0
    at_rest, at_work = tables(capsys.readouterr().out)
    assert [row["state"] for row in at_rest] == [
        state for state in ("just started", "with an engine", "after all requests") for _ in range(2)
    ]
    for row in at_rest:
        assert int(row["threads"]) > 1
        assert 0 < int(row["own MB"]) <= int(row["RSS, MB"])
    assert [(row["tokens"], row["at once"]) for row in at_work] == [
        (f"{tokens:,}", str(at_once)) for tokens, at_once, _ in cost.WORK
    ]


def test_wake_ups_are_a_seconds_by_name() -> None:
    before = cost.Look(10.0, 0.0, {(1, "loop"): 5, (2, "nixl"): 0, (3, "gone"): 9})
    after = cost.Look(12.0, 0.0, {(1, "loop"): 15, (2, "nixl"): 200, (4, "nixl"): 20})
    assert cost.wakeups(before, after) == {"loop": 5, "nixl": 110}


def test_what_cannot_be_measured_is_a_row_and_the_next_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--tokens 100 --pages 16 --layers 1 --batch 1 --way mapped"
    assert bench.main(["paged", "--device", "cpu", "--quick", *small.split()]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: ") == 2  # mla and gqa: host memory cannot be mapped
    assert "2 FAILED" in said


def test_the_fleet_page_is_told_of_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fleet", "--pairs", "2", "--pages", "2", "--seconds", "3"]) == 0
    none, one, two = rows(capsys.readouterr().out)
    assert (none["pages"], none["KB an answer"]) == ("0", "")
    assert [each["pairs told"] for each in (one, two)] == ["2", "2"]
    assert [each["daemons that do not answer"] for each in (one, two)] == ["0", "0"]
    assert all(float(each["answer p50 ms"]) > 0 for each in (one, two))
    (nobody, *_) = p99s = [float(each["p99 ms"]) for each in (none, one, two)]
    for each, p99 in zip((none, one, two), p99s, strict=True):
        least, most = (p99 - 0.05) / (nobody + 0.05), (p99 + 0.05) / (nobody - 0.05)  # as they were rounded
        assert least - 0.005 <= float(each["p99, of nobody's"]) <= most + 0.005
