"""`kvferry explain`: the JSON of design section 9, the words, and every way to be refused."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from caches import HND, NHD, array, as_tuples, attention, cache, table
from hypothesis import given
from strategies import Case, cases, tried

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferryd.explain import explain_json, explain_text, main, source_tables_from_json, summary
from kvferryd.explain.parts import parts
from kvferryd.plan import PlanRefused, bind, plan
from support import refused

EXAMPLES = sorted(Path(__file__).parent.joinpath("examples").iterdir())
TWO = [cache(*attention(2, start=2 * i, total=4), rank=i, of=2) for i in range(2)]
ONE = cache(*attention(4, slot=8, order=HND), engine="decode")


def files(folder: Path) -> list[str]:
    sources = [part for path in sorted(folder.glob("source[0-9]*.json")) for part in ("--source", str(path))]
    return [*sources, "--destination", str(folder / "destination.json")]


def tables_of(folder: Path, tokens: str) -> list[str]:
    theirs, ours = str(folder / "source_tables.json"), str(folder / "destination_tables.json")
    return ["--source-tables", theirs, "--destination-tables", ours, "--tokens", tokens]


def write(folder: Path, **contents: Any) -> list[str]:
    """source0=..., destination=... and so on as files; returns the arguments that name them."""
    argv = []
    for name, content in contents.items():
        path = folder / f"{name}.json"
        text = content.to_json() if isinstance(content, Manifest) else json.dumps(content)
        path.write_text(content if isinstance(content, str) else text)
        argv += [f"--{name.rstrip('0123456789').replace('_', '-')}", str(path)]
    return argv


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_with_tables_json_is_every_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((folder / "element_runs.json").read_text())
    first, last = expected["tokens"]
    assert main([*files(folder), *tables_of(folder, f"{first}:{last}"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["runs"]
    moved = [[*r[:2], r[2] + i, r[3], r[4] + i, 2] for r in answer["runs"] for i in range(0, r[5], 2)]
    assert sorted(moved) == sorted(expected["runs"])


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_without_tables_json_is_a_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["sources", "run_bytes", "descriptors_per_token", "path"]
    assert answer["path"] == "direct"
    assert answer["run_bytes"] > 0


def in_memory(manifest: Manifest, kind: str) -> Manifest:
    said = json.loads(manifest.to_json())
    return Manifest.from_dict(said | {"regions": [region | {"kind": kind} for region in said["regions"]]})


@pytest.mark.parametrize(
    ("theirs", "ours", "order", "path"),
    [
        ("host", "host", NHD, "direct"),
        ("host", "host", HND, "staged"),  # runs of one head of one token
        ("cuda", "cuda", NHD, "mapped"),
        ("cuda", "cuda", HND, "mapped"),
        ("host", "cuda", NHD, "direct"),
        ("host", "cuda", HND, "staged"),  # host memory is never mapped
    ],
)
def test_the_path_is_the_one_that_daemons_would_take(theirs: str, ours: str, order: str, path: str) -> None:
    """Their own rule decides, from the kind of memory on either side."""
    shape: dict[str, Any] = {"layers": range(1 if order == NHD else 80), "slot": 16, "block": 64}
    source = in_memory(cache(*attention(2, dim=8, **shape)), theirs)
    own = in_memory(cache(*attention(2, dim=8, order=order, **shape), engine="decode"), ours)
    assert explain_json([source], own, None)["path"] == path
    assert f"way: {path}" in explain_text([source], own, None)
    assert explain_json([source], own, None, way="direct")["path"] == "direct"


def test_the_summary_names_every_rank_that_is_read() -> None:
    answer = explain_json(TWO, ONE, None)
    assert [source["rank"] for source in answer["sources"]] == [0, 1]
    first = answer["sources"][0]
    assert first["engine_id"] == "prefill"
    assert (first["components"], first["layers"], first["bytes_per_token"]) == (["k", "v"], [0], 2 * 2 * 2 * 2)
    assert first["shares"][0] == {"component": "k", "axis": "head", "start": 0, "stop": 2, "total": 4}


def test_run_bytes_and_descriptors_are_those_of_scattered_blocks() -> None:
    answer = explain_json(TWO, ONE, None)
    assert answer["run_bytes"] == 2 * 2, "one token of one head"
    assert answer["descriptors_per_token"] == 2 * 4
    same = explain_json([cache(*attention())], cache(*attention(), engine="decode"), None)
    assert same["run_bytes"] == 4 * 2 * 2 * 2, "one block of K or V, although a row of blocks would be one run"
    assert same["descriptors_per_token"] == 2 / 4


def test_a_context_parallel_source_gives_its_share_of_every_token() -> None:
    sources = [cache(*attention(), rank=i, of=2, token_shard=(i, 2, 1)) for i in range(2)]
    answer = explain_json(sources, cache(*attention(), engine="decode"), None)
    assert [source["bytes_per_token"] for source in answer["sources"]] == [8.0, 8.0]
    assert "tokens of shard 1 of 2, 1 at a time" in explain_text(sources, cache(*attention(), engine="decode"), None)


def test_a_cache_of_states_only_is_explained_by_its_states() -> None:
    state = cache(array("ssm", order="block dim", block=3, dim=5, group="state"))
    answer = explain_json([state], state, None)
    assert (answer["run_bytes"], answer["descriptors_per_token"]) == (10, 0)
    assert answer["sources"][0]["state_bytes"] == 10


@tried(30)
@given(cases())
def test_anything_that_can_be_planned_can_be_explained(case: Case) -> None:
    chosen = plan(case.sources, case.destination)
    answer = explain_json(case.sources, case.destination, None)
    assert json.loads(json.dumps(answer)) == answer
    assert tuple(source["rank"] for source in answer["sources"]) == chosen.reads_from
    assert explain_text(case.sources, case.destination, None)
    tables = case.source_tables, case.destination_tables, case.tokens
    runs = explain_json(case.sources, case.destination, tables)["runs"]
    bound = bind(chosen, *tables)
    assert [tuple(run) for run in runs] == as_tuples(bound)
    assert bound.most_runs >= len(runs)
    assert explain_text(case.sources, case.destination, tables)


@tried(30)
@given(cases())
def test_the_parts_of_a_plan_are_all_that_it_reads_each_once(case: Case) -> None:
    chosen = plan(case.sources, case.destination)
    read = parts(chosen)
    assert {part.share.source_rank for part in read} == set(chosen.reads_from)
    assert sum(part.nbytes for part in read) == sum(copy.bytes_per_token for copy in chosen.copies)
    told = [(part.share, layer, name) for part in read for layer in part.layers for name in part.components]
    assert len(told) == len(set(told))
    wanted = {(component.layer, component.name) for component in case.destination.components}
    assert {(layer, name) for _, layer, name in told} == wanted


def test_words_say_who_reads_what() -> None:
    layers = [cache(*attention(2, layers=range(3), start=2 * i, total=4), rank=i, of=2) for i in range(2)]
    said = explain_text(layers, cache(*attention(4, layers=range(3)), engine="decode"), None)
    assert "decode rank 0 of 1 reads from 2 of 2 source ranks" in said
    assert "0-2" in said
    assert "head [2, 4) of 4" in said
    assert "way: direct" in said


def test_words_with_tables_count_runs_by_size() -> None:
    held = {0: {"full": table(4, 5)}, 1: {"full": table(1, 7)}}
    said = explain_text(TWO, ONE, (held, {"full": table(3)}, (0, 8)))
    assert "tokens 0 to 8 (excluded): 256 bytes in 64 runs" in said
    assert ["4", "64", "100.0%"] in [line.split() for line in said.splitlines()]


def test_words_for_an_empty_range() -> None:
    held = {i: {"full": table(4, 5)} for i in range(2)}
    assert "nothing is moved" in explain_text(TWO, ONE, (held, {"full": table(3)}, (4, 4)))


def turned(head: int, dim: int, blocks: int = 4) -> tuple[Manifest, Manifest]:
    """Two caches in which no two elements of a token follow one another on both sides."""
    source, own = (
        cache(array(order=order, block=blocks, slot=1024, head=head, dim=dim))
        for order in ("block slot head dim", "block slot dim head")
    )
    return source, own.of_engine("decode", "1")


@pytest.mark.parametrize("tables", [None, ({0: {"full": table(0)}}, {"full": table(1)}, (0, 1))])
def test_runs_are_counted_before_any_is_made(tables: Any) -> None:
    source, own = turned(4096, 4096)
    tracemalloc.start()
    try:
        with pytest.raises(KvferryError) as refused:
            explain_json([source], own, tables, 1 << 18)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (refused.value.code, refused.value.value) == ("too_many_runs", str(1 << (24 if tables else 34)))


def test_where_a_token_has_many_runs_fewer_tokens_are_typical(monkeypatch: pytest.MonkeyPatch) -> None:
    source, own = turned(16, 16)
    chosen = plan([source], own)
    assert len(summary.summarise(chosen).run_nbytes) == pytest.approx(4096 * 16 * 16, rel=0.01)
    monkeypatch.setattr(summary, "MOST_RUNS", 1024 * 16 * 16)
    fewer = summary.summarise(chosen)
    assert len(fewer.run_nbytes) == pytest.approx(1024 * 16 * 16, rel=0.01)
    assert fewer.descriptors_per_token == pytest.approx(16 * 16, rel=0.01)


def test_functions_raise_what_the_planner_raises() -> None:
    with pytest.raises(PlanRefused):
        explain_json([cache(*attention(), fingerprint="a")], cache(*attention(), fingerprint="b"), None)
    with pytest.raises(KvferryError, match="rank 0 is given 2 times"):
        explain_json([TWO[0], TWO[0]], ONE, None)


def test_a_refusal_exits_2_and_prints_every_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = cache(array(block=8, slot=4, head=2, dim=2, dtype="float16"), array("v", block=8, slot=4, head=2, dim=3))
    argv = write(tmp_path, source=cache(*attention()), destination=other)
    assert main([*argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "refused": [
            {"code": "dtype", "component": "0.k", "source": "bfloat16", "destination": "float16"},
            {"code": "inner_extent", "component": "0.v", "source": "dim 2", "destination": "dim 3"},
        ]
    }
    assert captured.err == ""
    assert main(argv) == 2
    said = capsys.readouterr().out
    assert "dtype: the element types differ (0.k)" in said
    for value in ("bfloat16", "float16", "dim 2", "dim 3", "->"):
        assert value in said


def test_words_of_a_refusal_tell_a_reason_once_for_all_its_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    destination = cache(*attention(layers=range(9), dtype="float16"))
    assert main(write(tmp_path, source=cache(*attention(layers=range(9))), destination=destination)) == 2
    said = capsys.readouterr().out
    assert said.count("dtype:") == 1
    assert "0.k, 0.v, 1.k, 1.v, 2.k, 2.v and 12 more" in said


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_manifest_that_breaks_a_rule_is_refused_in_the_same_form(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = json.loads(cache(*attention()).to_json())
    broken["regions"][0]["nbytes"] = 100
    argv = write(tmp_path, **{"source": cache(*attention()), "destination": cache(*attention()), side: broken})
    assert main([*argv, "--json"]) == 2
    (reason,) = json.loads(capsys.readouterr().out)["refused"]
    assert (reason["code"], reason["component"]) == ("out_of_region", "0.k")
    assert "100" in reason[side]
    assert main(argv) == 2
    assert f"{side}.json" in capsys.readouterr().out


def wrong(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, str]:
    """The error of a call that is no refusal: told on stderr, and with --json as an object on stdout."""
    assert main(argv) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert main([*argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == plain.err
    answer = json.loads(captured.out)
    assert answer["refused"][0]["code"] == answer["error"]["code"]
    assert answer["error"]["message"] in captured.err
    assert answer["error"]["remedy"]
    return answer["error"]


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = wrong(capsys, ["--source", str(tmp_path / "none.json"), "--destination", str(tmp_path)])
    assert (error["code"], error["field"]) == ("unreadable_file", "--source")
    assert "none.json" in error["message"]


@pytest.mark.parametrize("content", ["{", "", "[1,]", "\ud800", "[" * 100_000])
def test_a_file_that_is_not_json(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source.json").write_bytes(
        content.encode("utf-16" if "\ud800" in content else "utf-8", "surrogatepass")
    )
    error = wrong(capsys, ["--source", str(tmp_path / "source.json"), "--destination", "d"])
    assert (error["code"], error["field"]) == ("malformed_json", "--source")


def test_names_that_are_not_unicode_are_told_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = json.loads(ONE.to_json()) | {"engine_id": "\ud800"}
    argv = write(tmp_path, source=broken, destination=ONE)
    for more in ([], ["--json"]):
        assert main([*argv, *more]) == 2
        assert "\\ud800" in capsys.readouterr().out


@pytest.mark.parametrize("content", [[], 3, None, {}, "text", {"regions": 1}])
def test_json_that_is_no_manifest(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source.json").write_text(json.dumps(content))
    assert main(["--source", str(tmp_path / "source.json"), "--destination", "d", "--json"]) == 2
    (reason,) = json.loads(capsys.readouterr().out)["refused"]
    assert reason["code"] == "malformed_manifest"


@pytest.mark.parametrize("tokens", ["", "4", "4:", ":4", "a:b", "-1:4", "8:4", "0:4:8", "0.5:4", "٠:٤"])
def test_a_token_range_that_is_none(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = EXAMPLES[0]
    error = wrong(capsys, [*files(folder), *tables_of(folder, "")[:-2], f"--tokens={tokens}"])
    assert (error["code"], error["field"]) == ("bad_argument", "--tokens")


@pytest.mark.parametrize("missing", [0, 2, 4])
def test_tables_come_together(missing: int, capsys: pytest.CaptureFixture[str]) -> None:
    given = tables_of(EXAMPLES[0], "0:4")
    flag = given[missing]
    error = wrong(capsys, [*files(EXAMPLES[0]), *given[:missing], *given[missing + 2 :]])
    assert (error["code"], error["field"]) == ("bad_argument", flag)


def test_tables_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = write(
        tmp_path, source0=TWO[0], source1=TWO[1], destination=ONE, destination_tables={"full": {"block_ids": [99]}},
        source_tables={str(i): {"full": {"block_ids": [1, 2]}} for i in range(2)},
    )  # fmt: skip
    assert wrong(capsys, [*argv, "--tokens", "0:8"])["code"] == "block_id_out_of_range"
    assert wrong(capsys, [*argv, "--tokens", "0:99"])["code"] in ("block_id_out_of_range", "tables_too_short")


def test_an_unknown_flag_and_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong(capsys, ["--sauce", "x"])["code"] == "bad_argument"
    assert wrong(capsys, [])["code"] == "bad_argument"
    assert wrong(capsys, ["--transfer", "r", "--source", "x"])["field"] == "--transfer"


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with refused(0, SystemExit):
        main(["--help"])
    assert "kvferry explain --source" in capsys.readouterr().out


def test_source_tables_by_group_are_for_a_single_source() -> None:
    by_group, by_rank = {"full": {"block_ids": [4]}}, {"0": {"full": {"block_ids": [4]}}}
    assert (
        source_tables_from_json(by_group, [ONE]) == source_tables_from_json(by_rank, [ONE]) == {0: {"full": table(4)}}
    )
    with pytest.raises(KvferryError, match="by rank"):
        source_tables_from_json(by_group, TWO)


@pytest.mark.parametrize("data", [{"7": {}}, {"x": {}}, {"-1": {}}, {"0": 3}, {"0": {"full": [4]}}, [], 3, None])
def test_source_tables_that_are_none(data: Any) -> None:
    with refused("malformed_tables"):
        source_tables_from_json(data, TWO)


def short_runs(way: str) -> str:
    """Runs of two elements, thousands of them."""
    source, destination = attention(8, block=256), attention(8, block=256, order=HND)
    return explain_text([cache(*source)], cache(*destination, engine="decode"), None, way)


def test_words_say_what_every_way_takes_and_warn_of_one_that_is_far_from_the_best() -> None:
    said = short_runs("direct")
    assert "direct" in said and "staged" in said
    assert "<- way = direct" in said
    assert "times as long as staged" in said
    assert "set way = auto" in said
    said = short_runs("auto")
    assert "way: staged" in said
    assert "warning" not in said
