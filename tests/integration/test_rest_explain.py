"""POST /v1/explain: the planner, asked from outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from test_openapi import EXAMPLES
from test_rest import post, problem

pytest.importorskip("kvferryd.explain")

EXPLAIN = EXAMPLES["POST /v1/explain"]
SUMMARY: dict[str, Any] = EXPLAIN["bodies"]["summary"]["value"]
RUNS: dict[str, Any] = EXPLAIN["bodies"]["every run"]["value"]


def changed(body: dict[str, Any], *path: Any, to: object) -> dict[str, Any]:
    result = copy.deepcopy(body)
    place = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return result


def many_runs(body: dict[str, Any]) -> dict[str, Any]:
    """A token has 2^26: its elements lie in another order on either side."""
    result, extent = copy.deepcopy(body), 1 << 13
    for side, strides in ((result["sources"][0], (2 * extent, 2)), (result["destination"], (2, 2 * extent))):
        axes = side["components"][0]["axes"]
        for axis, stride in zip(axes[2:], strides, strict=True):
            axis.update(extent=extent, stride=stride)
        axes[1]["stride"] = 2 * extent**2
        axes[0]["stride"] = axes[1]["stride"] * axes[1]["extent"]
        side["regions"][0]["nbytes"] = axes[0]["stride"] * axes[0]["extent"]
    return result


@pytest.mark.parametrize("name", ["summary", "every run"])
def test_the_examples_of_the_documentation_are_answered_as_it_says(name: str) -> None:
    answer = post("/v1/explain", EXPLAIN["bodies"][name]["value"])
    assert answer.status_code == 200, answer.text
    assert answer.json() == EXPLAIN["answers"]["200"][name]["value"]


def test_tables_may_be_given_by_rank() -> None:
    by_rank = changed(RUNS, "tables", "source", to={"0": RUNS["tables"]["source"]})
    assert post("/v1/explain", by_rank).json() == post("/v1/explain", RUNS).json()


def test_a_refused_pair_lists_why_with_both_values() -> None:
    answer = post("/v1/explain", changed(SUMMARY, "destination", "model", "fingerprint", to="other"))
    refusal = problem(answer, 422, "refused")["refusals"][0]
    assert (refusal["code"], refusal["destination"]) == ("fingerprint", "other")
    assert "tiny-1" in refusal["source"]


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (changed(SUMMARY, "sources", to=[]), "malformed_request", "sources"),
        (changed(SUMMARY, "sources", 0, "epoch", to=7), "malformed_manifest", "sources.0.epoch"),
        (
            changed(SUMMARY, "sources", 0, "components", 0, "group", to="x"),
            "unknown_group",
            "sources.0.components[0.k].group",
        ),
        (
            changed(SUMMARY, "destination", "components", 0, "offset", to=1 << 40),
            "out_of_region",
            "destination.components[0.k].offset",
        ),
        (changed(RUNS, "tables", "source", to={"x": {}, "0": {}}), "malformed_tables", "tables.source.x"),
        (changed(RUNS, "tables", "destination", to={"full": [1]}), "malformed_tables", "tables.destination.full"),
        (changed(RUNS, "tables", "destination", "full", "block_ids", to=[0] * 300_000), "too_many_runs", "tables"),
        (many_runs(RUNS), "too_many_runs", "tables"),
        (many_runs(SUMMARY), "too_many_runs", "sources"),
    ],
)
def test_what_is_malformed_is_named(body: dict[str, Any], code: str, field: str) -> None:
    assert problem(post("/v1/explain", body), 422, code)["field"] == field
