"""Three requests with the exact answer, element by element (tests/unit/examples, from the project's design)."""

import json
from pathlib import Path

import pytest
from caches import as_tuples
from oracle import Run, mergeable, needs, verify
from strategies import Case

from kvferry.manifest import Manifest
from kvferry.tables import tables_from_json
from kvferryd.plan import bind, plan

EXAMPLES = sorted(Path(__file__).parent.joinpath("examples").iterdir())


def read(folder: Path) -> tuple[Case, set[Run]]:
    def data(name: str):
        return json.loads((folder / name).read_text())

    expected = data("element_runs.json")
    case = Case(
        tuple(Manifest.from_json(path.read_text()) for path in sorted(folder.glob("source[0-9]*.json"))),
        {int(rank): tables_from_json(tables) for rank, tables in data("source_tables.json").items()},
        Manifest.from_json((folder / "destination.json").read_text()),
        tables_from_json(data("destination_tables.json")),
        tuple(expected["tokens"]),
    )
    return case, {tuple(run) for run in expected["runs"]}


def elements(runs: list[Run], itemsize: int) -> list[Run]:
    return [
        (rank, region, source + at, to, destination + at, itemsize)
        for rank, region, source, to, destination, nbytes in runs
        for at in range(0, nbytes, itemsize)
    ]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_planner_moves_exactly_the_elements_of_the_example(folder: Path) -> None:
    case, expected = read(folder)
    bound = bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)
    runs = as_tuples(bound)
    moved = elements(runs, itemsize=2)
    assert len(moved) == len(expected)
    assert set(moved) == expected
    assert mergeable(runs) == []


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_oracle_agrees_with_the_example(folder: Path) -> None:
    case, expected = read(folder)
    answer = case.sources, case.source_tables, case.destination, case.destination_tables, case.tokens
    verify(*answer, expected)
    assert {
        (place.rank, place.region, place.offset, need.destination.region, need.destination.offset, place.nbytes)
        for need in needs(*answer)
        for place in need.sources
    } == expected


def test_the_examples_are_there() -> None:
    assert len(EXAMPLES) == 3
