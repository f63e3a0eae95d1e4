"""The table that `kvferry bench` prints and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.errors import KvferryError
from kvferryd import bench
from kvferryd.bench.gpu_table import COLUMNS, Row, Table


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
    with pytest.raises(KvferryError, match="cannot be kept") as caught:
        Table(tmp_path / "no" / "rows.jsonl")
    assert caught.value.code == "not_writable"


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["plan", "--quick"], ["plan", "--case", "TP"], ["--json", "rows.jsonl"]]
)
def test_arguments_that_mean_nothing_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2
    assert "gpu" in capsys.readouterr().err
