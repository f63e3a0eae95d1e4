"""Manifests, tables and problems as protobuf messages and back."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caches import array, attention, cache, table
from hypothesis import given
from strategies import Case, cases, tried

from kvferry.errors import LONGEST, KvferryError, Refusal
from kvferry.manifest import Manifest, ManifestError
from kvferry.manifest.model import MOST
from kvferry.tables import MAX_BLOCKS, BlockTable
from kvferry.v1 import layout_pb2 as pb
from kvferry.wire import (
    MAX_PROBLEM_BYTES,
    manifest_from_proto,
    manifest_to_proto,
    problem_from_proto,
    problem_to_proto,
    tables_from_proto,
    tables_to_proto,
)
from support import refused


@tried(30)
@given(cases())
def test_manifests_and_tables_survive_the_wire(case: Case) -> None:
    for manifest in (*case.sources, case.destination):
        sent = manifest_to_proto(manifest).SerializeToString()
        assert manifest_from_proto(pb.Manifest.FromString(sent)) == manifest
    for tables in (*case.source_tables.values(), case.destination_tables):
        sent = tables_to_proto(tables).SerializeToString()
        assert tables_from_proto(pb.Tables.FromString(sent)) == tables


def sound() -> Manifest:
    state = array("ssm", order="block dim", block=3, dim=2, group="state")
    packed = array("packed", block=8, slot=4, head=1, dim=2, dtype="uint8", encoding="nvfp4", whole=("slot", "dim"))
    return cache(*attention(), packed, state, rank=1, of=2, windows={"full": 6}, token_shard=(1, 2, 16))


def message() -> pb.Manifest:
    return manifest_to_proto(sound())


def test_every_field_survives() -> None:
    manifest = sound().model_copy(update={"parallel": {"tp": 2, "pp": 1}})
    assert manifest_from_proto(manifest_to_proto(manifest)) == manifest


def test_a_window_and_a_shard_that_are_absent_stay_absent() -> None:
    back = manifest_from_proto(manifest_to_proto(cache(array(block=2, slot=2, head=1, dim=1))))
    assert back.groups[0].window is None
    assert back.components[0].shard is None


def unread(sent: pb.Manifest) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        manifest_from_proto(sent)
    return caught.value


@pytest.mark.parametrize("kind", [0, 3, 99])
def test_an_unspecified_or_unknown_memory_kind_is_refused(kind: int) -> None:
    sent = message()
    sent.regions[0].kind = kind  # type: ignore[assignment]
    assert unread(sent).field == "regions[0].kind"


@pytest.mark.parametrize("kind", [0, 3, 99])
def test_an_unspecified_or_unknown_group_kind_is_refused(kind: int) -> None:
    sent = message()
    sent.groups[0].kind = kind  # type: ignore[assignment]
    error = unread(sent)
    assert (error.code, error.field) == ("malformed_manifest", "groups[full].kind")
    assert "paged" in error.remedy


@pytest.mark.parametrize("name", ["regions", "groups", "parallel"])
def test_of_what_a_manifest_has_too_many_no_more_than_that_is_read(name: str) -> None:
    """A peer may send 16 MiB of them."""
    sent = message()
    if name == "parallel":
        sent.parallel.update({str(number): 1 for number in range(300_000)})
    else:
        getattr(sent, name).extend([getattr(sent, name)[0]] * 300_000)
    tracemalloc.start()
    try:
        error = unread(sent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert name in error.field
    assert peak < 300_000 * 64


def test_an_empty_message_is_refused() -> None:
    assert unread(pb.Manifest()).code == "malformed_manifest"


def test_a_group_without_a_token_shard_holds_every_token() -> None:
    sent = manifest_to_proto(cache(*attention()))
    sent.groups[0].ClearField("token_shard")
    assert manifest_from_proto(sent).groups[0].token_shard.size == 1


def test_a_token_shard_that_is_there_has_to_be_complete() -> None:
    sent = message()
    sent.groups[0].token_shard.ClearField("interleave")
    assert unread(sent).field == "groups.0.token_shard.interleave"


def test_a_window_of_zero_is_refused_rather_than_taken_for_none() -> None:
    sent = message()
    sent.groups[0].window = 0
    assert unread(sent).field == "groups.0.window"


def test_rules_hold_on_the_wire_too() -> None:
    sent = message()
    sent.regions[0].nbytes = 10
    error = unread(sent)
    assert (error.code, error.component) == ("out_of_region", "0.k")
    sent = message()
    sent.components[0].axes[0].stride = 2**64 - 1
    assert unread(sent).field == "components.0.axes.0.stride"


@pytest.mark.parametrize(
    "update", [{"rank": 2**32, "world_size": 2**32 + 1}, {"parallel": {"tp": -1}}, {"parallel": {"tp": 2**32}}]
)
def test_a_number_that_does_not_fit_the_wire_is_refused_before_it_is_sent(update: dict) -> None:
    with refused("malformed_manifest", ManifestError):
        manifest_to_proto(sound().model_copy(update=update))


def test_tables_from_the_wire_are_checked() -> None:
    with refused("malformed_tables", field="tables.full.first_token"):
        tables_from_proto(pb.Tables(groups={"full": pb.BlockTable(block_ids=[1], first_token=-1)}))


@pytest.mark.parametrize(
    "ids",
    [[1.5], [math.nan], [True], ["7"], [2**63], np.array([True, False]), np.array([2.0]), np.array([2**63], np.uint64)],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_block_ids_that_are_no_integers_are_refused_and_not_rounded(ids: Any) -> None:
    with refused("malformed_tables", field="tables.block_ids"):
        BlockTable.of(ids)


def test_a_table_has_ids_of_its_own() -> None:
    """An engine fills its array anew for the next request."""
    ids = np.array([7, 3, 9])
    made = BlockTable.of(ids)
    ids[:] = 0
    assert made == BlockTable.of([7, 3, 9])


class TooMany(list[int]):
    def __len__(self) -> int:
        return MAX_BLOCKS + 1

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("copied")


@pytest.mark.parametrize(
    "read",
    [
        lambda ids: tables_from_proto(SimpleNamespace(groups={"full": SimpleNamespace(block_ids=ids, first_token=0)})),
        lambda ids: BlockTable.of(ids, field="tables.full"),
    ],
    ids=["message", "list"],
)
def test_a_table_that_is_too_long_is_refused_before_it_is_copied(read: Callable[[list[int]], object]) -> None:
    with pytest.raises(KvferryError) as caught:
        read(TooMany())
    told = caught.value.code, caught.value.field, caught.value.value
    assert told == ("malformed_tables", "tables.full.block_ids", f"{MAX_BLOCKS + 1} ids")
    assert str(MAX_BLOCKS) in caught.value.remedy


def test_tables_of_more_groups_than_there_may_be_are_refused_before_any_is_made() -> None:
    with refused("malformed_tables", field="tables"):
        tables_from_proto(pb.Tables(groups={str(group): pb.BlockTable() for group in range(1 + MOST["groups"])}))


def test_an_empty_table_stays_a_table() -> None:
    assert tables_from_proto(tables_to_proto({"full": table(first_token=8)})) == {"full": table(first_token=8)}


def test_a_problem_survives_the_wire() -> None:
    refusal = Refusal("dtype", "0.k", "bfloat16", "float16")
    sent = KvferryError("refused", "no", field="f", value=3, remedy="do", refusals=(refusal,))
    back = problem_from_proto(pb.Problem.FromString(problem_to_proto(sent).SerializeToString()))
    assert (back.code, back.message, back.field, back.value, back.remedy) == ("refused", "no", "f", "3", "do")
    assert back.refusals == (refusal,)
    assert str(back) == str(sent)


def test_a_problem_without_a_code_is_internal() -> None:
    back = problem_from_proto(pb.Problem())
    assert back.code == "internal"
    assert back.message


def test_text_that_is_not_unicode_is_told_as_well() -> None:
    assert problem_to_proto(KvferryError("malformed", "bad", value="\ud800")).value == "\\ud800"
    with refused("malformed_tables"):
        tables_to_proto({"\ud800": table(1)})


def test_very_many_refusals_still_fit_into_metadata() -> None:
    many = tuple(Refusal("dtype", f"{layer}.k", "bfloat16", "float16") for layer in range(2000))
    sent = problem_to_proto(KvferryError("refused", "2000 reasons" * 1000, refusals=many))
    assert sent.ByteSize() <= MAX_PROBLEM_BYTES
    assert len(sent.refusals) > 100
    assert problem_from_proto(sent).refusals == many[: len(sent.refusals)]


def test_a_problem_that_another_process_tells_is_no_longer_than_ours() -> None:
    long, some = "x" * (1 << 20), pb.Refusal(code="dtype", component="0.k", source="bfloat16", destination="float16")
    said = pb.Problem(code=long, message=long, field=long, value=long, remedy=long, refusals=[some] * (1 << 16))
    back = problem_from_proto(said)
    assert max(map(len, (back.code, back.message, back.field, back.value, back.remedy, *back.args))) <= LONGEST
    assert len(str(back)) < 4 * LONGEST + 2 * MAX_PROBLEM_BYTES
    assert not problem_from_proto(pb.Problem(refusals=[pb.Refusal(source=long)])).refusals


@pytest.mark.parametrize("given", [{"full": [7, 3, 9]}, [7, 3, 9]])
def test_a_list_for_a_table_is_refused_with_what_to_write(given: object) -> None:
    with refused("malformed_tables", field="tables") as caught:
        tables_to_proto(given)  # type: ignore[arg-type]
    assert "BlockTable.of([7, 3, 9])" in caught.value.remedy
