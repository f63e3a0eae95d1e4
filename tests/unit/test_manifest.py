"""The rules of a manifest, each with one that breaks it; and the builder, which describes arrays as they are."""

import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from caches import array, attention, cache
from hypothesis import given
from oracle import byte_offset
from strategies import Case, cases, tried

from kvferry.errors import KvferryError
from kvferry.manifest import (
    ENCODINGS,
    ITEMSIZE,
    Manifest,
    ManifestBuilder,
    ManifestError,
    ModelInfo,
    Shard,
    TokenShard,
    encoding_of,
)
from kvferry.manifest.encoding import ALIASES, OF_DTYPE
from support import refused

Change = Callable[[dict[str, Any]], object]


def document() -> dict[str, Any]:
    """A sound manifest as parsed JSON: K and V of one layer, and a state."""
    return json.loads(cache(*attention(), array("ssm", order="block dim", block=3, dim=2, group="state")).to_json())


def k(data: dict[str, Any]) -> dict[str, Any]:
    return data["components"][0]


def axis(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(axis for axis in k(data)["axes"] if axis["name"] == name)


def breach(change: Change) -> ManifestError:
    data = document()
    change(data)
    with pytest.raises(ManifestError) as caught:
        Manifest.from_dict(data)
    with refused(caught.value.code, ManifestError, field=caught.value.field):
        Manifest.from_json(json.dumps(data))
    error = caught.value
    assert isinstance(error, KvferryError)
    assert error.message
    assert error.field
    assert error.remedy
    return error


def test_the_document_is_sound() -> None:
    assert Manifest.from_dict(document()).components[0].label == "0.k"


@pytest.mark.parametrize("read", ["dict", "json"])
def test_other_threads_get_their_turns_while_a_large_manifest_is_read(read: str) -> None:
    """Pydantic keeps the interpreter to itself until it calls something of ours."""
    data = document()
    data["components"] = [k(data) | {"layer": layer} for layer in range(20_000)]
    text, turns, over = json.dumps(data), 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(1e-4):
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    gc.disable()  # hypothesis' work at each collection gives others a turn
    try:
        while not turns:
            time.sleep(0)
        before = turns
        manifest = Manifest.model_validate(data) if read == "dict" else Manifest.model_validate_json(text)
        during = turns - before
    finally:
        gc.enable()
        over.set()
        other.join()
    assert during > 5
    assert len(manifest.components) == 20_000


def test_components_that_are_alike_share_their_parts() -> None:
    """Or a large manifest is millions of objects for the garbage collector, which lets nothing else go on."""
    first, second = Manifest.from_dict(document()), Manifest.from_json(json.dumps(document()))
    for ours, theirs in zip(first.components, second.components, strict=True):
        assert ours.axes is theirs.axes and ours.shard is theirs.shard


def test_another_engine_with_the_same_cache_shares_its_parts_and_is_checked_by_name() -> None:
    first = Manifest.from_dict(document())
    second = first.of_engine("second", "e2")
    assert second == Manifest.from_dict(document() | {"engine_id": "second", "epoch": "e2"})
    assert all(ours is theirs for ours, theirs in zip(second.components, first.components, strict=True))
    for names in (("", "e2"), ("second", ""), ("x" * 257, "e2")):
        with refused("malformed_manifest", ManifestError):
            first.of_engine(*names)


BREACHES: list[tuple[str, str, Change]] = [
    ("duplicate", "regions.id", lambda d: d["regions"].append(d["regions"][0])),
    ("duplicate", "groups.name", lambda d: d["groups"].append(d["groups"][0])),
    ("duplicate", "components.(layer, name)", lambda d: d["components"].append(k(d))),
    ("rank_out_of_range", "rank", lambda d: d.update(rank=1)),
    ("token_shard_out_of_range", "groups[full].token_shard.rank",
     lambda d: d["groups"][0]["token_shard"].update(rank=2, size=2)),
    ("state_group", "groups[state]", lambda d: d["groups"][1].update(block_size=2)),
    ("state_group", "groups[state]", lambda d: d["groups"][1].update(window=2)),
    ("state_group", "groups[state]", lambda d: d["groups"][1]["token_shard"].update(size=2)),
    ("unknown_group", "components[0.k].group", lambda d: k(d).update(group="none")),
    ("unknown_region", "components[0.k].region", lambda d: k(d).update(region=7)),
    ("unknown_dtype", "components[0.k].dtype", lambda d: k(d).update(dtype="torch.bfloat16")),
    ("unknown_encoding", "components[0.k].encoding", lambda d: k(d).update(encoding="fp8")),
    ("unknown_encoding", "components[0.k].encoding", lambda d: k(d).update(encoding="opaque:")),
    ("encoding_dtype", "components[0.k].encoding", lambda d: k(d).update(encoding="fp16")),
    ("encoding_dtype", "components[0.k].encoding", lambda d: k(d).update(dtype="int16", encoding="fp8_e4m3fn")),
    ("whole_axis", "components[0.k].whole", lambda d: k(d).update(whole=["layer"])),
    ("whole_axis", "components[0.k].whole", lambda d: k(d).update(whole=["slot", "block"])),
    ("axes", "components[0.k].axes", lambda d: axis(d, "block").update(name="page")),
    ("axes", "components[0.k].axes", lambda d: axis(d, "slot").update(name="token")),
    ("axes", "components[0.ssm].axes", lambda d: d["components"][2]["axes"][1].update(name="slot")),
    ("axis_extent", "components[0.k].axes[block].extent", lambda d: d["groups"][0].update(num_blocks=9)),
    ("axis_extent", "components[0.k].axes[slot].extent", lambda d: d["groups"][0].update(block_size=5)),
    ("axis_extent", "components[0.k].axes[slot].extent",
     lambda d: k(d)["axes"].append({"name": "slot", "extent": 2, "stride": 999})),
    ("shard_axis", "components[0.k].shard.axis", lambda d: k(d)["shard"].update(axis="layer")),
    ("shard_axis", "components[0.k].shard.axis", lambda d: k(d)["shard"].update(axis="slot")),
    ("shard_axis", "components[0.k].shard.axis", lambda d: k(d)["shard"].update(axis="block")),
    ("shard_range", "components[0.k].shard", lambda d: k(d)["shard"].update(start=1)),
    ("shard_range", "components[0.k].shard", lambda d: k(d)["shard"].update(total=1)),
    ("overlapping_strides", "components[0.k].axes[dim].stride", lambda d: axis(d, "dim").update(stride=1)),
    ("overlapping_strides", "components[0.k].axes[dim].stride", lambda d: axis(d, "dim").update(stride=0)),
    ("overlapping_strides", "components[0.k].axes[head].stride", lambda d: axis(d, "head").update(stride=3)),
    ("overlapping_strides", "components[0.k].axes[block].stride", lambda d: axis(d, "block").update(stride=31)),
    ("out_of_region", "components[0.k].offset", lambda d: k(d).update(offset=10**6)),
    ("out_of_region", "components[0.k].offset", lambda d: axis(d, "block").update(stride=2**61)),
    ("out_of_region", "components[0.k].offset", lambda d: k(d).update(offset=2**62 - 1)),
    ("out_of_region", "components[0.k].offset", lambda d: d["regions"][0].update(nbytes=255)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "field", "change"), BREACHES)
def test_a_broken_rule_is_named_with_its_place(code: str, field: str, change: Change) -> None:
    error = breach(change)
    assert (error.code, error.field) == (code, field)
    if field.startswith("components["):
        assert error.component == field.removeprefix("components[").split("]")[0]
        assert error.component in error.message


MALFORMED: list[tuple[str, Change]] = [
    ("components.0.offset", lambda d: k(d).update(offset=-1)),
    ("components.0.offset", lambda d: k(d).update(offset=2**62)),
    ("components.0.offset", lambda d: k(d).update(offset=1.5)),
    ("components.0.offset", lambda d: k(d).update(offset="0")),
    ("components.0.layer", lambda d: k(d).update(layer=True)), ("components.0.layer", lambda d: k(d).update(layer=-1)),
    ("components.0.axes.1.stride", lambda d: axis(d, "slot").update(stride=-8)),
    ("components.0.axes.1.stride", lambda d: axis(d, "slot").update(stride=2**64)),
    ("components.0.axes.1.extent", lambda d: axis(d, "slot").update(extent=0)),
    ("components.0.axes", lambda d: k(d).update(axes=[])),
    ("components.0.axes", lambda d: k(d).update(axes=[{"name": "x", "extent": 1, "stride": 1}] * 17)),
    ("components.0.name", lambda d: k(d).update(name="")), ("components.0.name", lambda d: k(d).update(name="k" * 257)),
    ("components.0.shard.start", lambda d: k(d)["shard"].update(start=-1)),
    ("components.0.strides", lambda d: k(d).update(strides=[1])), ("components", lambda d: d.update(components=[])),
    ("regions.0.nbytes", lambda d: d["regions"][0].update(nbytes=0)),
    ("regions.0.kind", lambda d: d["regions"][0].update(kind="disk")),
    ("regions.0.id", lambda d: d["regions"][0].update(id=-1)),
    ("groups.0.kind", lambda d: d["groups"][0].update(kind="ring")),
    ("groups.0.block_size", lambda d: d["groups"][0].update(block_size=0)),
    ("groups.0.window", lambda d: d["groups"][0].update(window=0)),
    ("groups.0.token_shard.interleave", lambda d: d["groups"][0]["token_shard"].update(interleave=0)),
    ("engine_id", lambda d: d.pop("engine_id")), ("epoch", lambda d: d.update(epoch="")),
    ("world_size", lambda d: d.update(world_size=0)), ("model.fingerprint", lambda d: d["model"].pop("fingerprint")),
    ("surprise", lambda d: d.update(surprise=1)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "change"), MALFORMED)
def test_a_field_of_another_type_or_size_is_named(field: str, change: Change) -> None:
    error = breach(change)
    assert (error.code, error.field) == ("malformed_manifest", field)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00", "[" * 10_000])
def test_text_that_is_no_manifest(text: str) -> None:
    with refused("malformed_manifest", ManifestError):
        Manifest.from_json(text)


def test_a_manifest_has_so_many_components() -> None:
    data = document()
    with refused("malformed_manifest", ManifestError, field="components"):
        Manifest.from_dict(data | {"components": [k(data)] * 65_537})


def test_a_long_value_is_shortened_in_the_error() -> None:
    assert len(breach(lambda d: k(d).update(offset="9" * 100_000)).value) <= 200


def test_the_stride_of_an_axis_of_one_position_is_free() -> None:
    data = document()
    k(data)["axes"].append({"name": "one", "extent": 1, "stride": 0})
    k(data)["axes"].append({"name": "other", "extent": 1, "stride": 2**61})
    Manifest.from_dict(data)


def test_groups_may_share_bytes_as_those_of_one_pool_do() -> None:
    data = document()
    data["groups"].append(data["groups"][0] | {"name": "window", "window": 4})
    data["components"][1] |= {"offset": k(data)["offset"], "group": "window"}
    Manifest.from_dict(data)


def test_components_of_a_group_that_share_a_byte_are_refused_by_name() -> None:
    data = document()
    data["components"][1]["offset"] -= 1
    with pytest.raises(ManifestError) as caught:
        Manifest.from_dict(data)
    error = caught.value
    assert (error.code, error.component, error.field) == (
        "overlapping_components", "0.v", "components[0.v].offset"
    )  # fmt: skip
    assert "0.k" in error.message
    assert "full" in error.message


def test_the_last_byte_of_the_region_may_be_used() -> None:
    manifest = cache(array(block=2, slot=2, head=1, dim=1))
    component = manifest.components[0]
    assert component.offset + component.nbytes_spanned == manifest.regions[0].nbytes == 8


def test_state_groups_need_not_say_what_they_do_not_have() -> None:
    data = document()
    for name in ("block_size", "window", "token_shard"):
        data["groups"][1].pop(name)
    assert Manifest.from_dict(data).groups[1].block_size == 1


@tried(30)
@given(cases())
def test_json_and_back_is_the_same(case: Case) -> None:
    for manifest in (*case.sources, case.destination):
        assert Manifest.from_json(manifest.to_json()) == manifest
        assert Manifest.from_dict(json.loads(manifest.to_json())) == manifest


def builder(memory: Any, nbytes: int | None = None) -> ManifestBuilder:
    address = memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.__array_interface__["data"][0]
    made = ManifestBuilder(
        "prefill", "1", ModelInfo(name="m", fingerprint="f"), rank=1, world_size=2, parallel={"tp": 2}
    )
    return made.region(0, "host", nbytes=nbytes or memory.nbytes, address=address)


def assert_describes(manifest: Manifest, memory: np.ndarray, view: np.ndarray, names: tuple[str, ...]) -> None:
    """The byte offset of every element is where numpy has it."""
    component = manifest.components[0]
    for index in np.ndindex(view.shape):
        at = byte_offset(component, dict(zip(names, index, strict=True)))
        assert memory.view(np.uint8).reshape(-1)[at : at + component.itemsize].tobytes() == view[index].tobytes()


AXES = ("block", "slot", "head", "dim")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_the_builder_describes_transposed_arrays(order: tuple[int, ...]) -> None:
    memory = np.arange(3 * 4 * 2 * 5, dtype=np.int16).reshape([(3, 4, 2, 5)[i] for i in order])
    view = memory.transpose(np.argsort(order))
    made = builder(memory).group("full", num_blocks=3, block_size=4)
    manifest = made.component(
        "full", layer=7, name="k", array=view, axes=AXES, shard=Shard(axis="head", start=2, total=4)
    )
    built = manifest.build()
    assert (built.rank, built.world_size, built.parallel) == (1, 2, {"tp": 2})
    assert built.components[0].shard == Shard(axis="head", start=2, total=4)
    assert_describes(built, memory, view, AXES)


def test_the_builder_describes_slices_of_a_larger_array() -> None:
    memory = np.arange(3 * 2 * 4 * 2 * 6, dtype=np.int32).reshape(3, 2, 4, 2, 6)
    value = memory[:, 1, :, :, 1:5]
    built = builder(memory).group("full", num_blocks=3, block_size=4)
    manifest = built.component("full", layer=0, name="v", array=value, axes=AXES).build()
    assert manifest.components[0].offset == 4 * 2 * 6 * 4 + 4
    assert_describes(manifest, memory, value, AXES)


def test_the_builder_refuses_an_array_that_lies_elsewhere() -> None:
    both = np.zeros((2, 3, 4, 2, 5), dtype=np.int16)
    for here, there, code in ((0, 1, "out_of_region"), (1, 0, "malformed_manifest")):
        made = builder(both[here]).group("full", num_blocks=3, block_size=4)
        with pytest.raises(ManifestError) as caught:
            made.component("full", layer=0, name="k", array=both[there], axes=AXES)
        error = caught.value
        assert (error.code, error.field) == (code, "components[0.k].array")
        assert "not a copy" in error.remedy


def test_the_builder_describes_torch_tensors_as_it_does_arrays() -> None:
    memory = torch.arange(3 * 4 * 2 * 6, dtype=torch.int16).reshape(3, 2, 6, 4)
    view = memory.permute(0, 3, 1, 2)[..., ::2]
    made = builder(memory).group("full", num_blocks=3, block_size=4)
    manifest = made.component("full", layer=0, name="k", array=view, axes=AXES).build()
    assert manifest.components[0].dtype == "int16"
    assert_describes(manifest, memory.numpy(), view.numpy(), AXES)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "bool"]
)
def test_dtypes_of_torch_are_known_by_their_names(name: str) -> None:
    tensor = torch.zeros((2, 4, 1, 2), dtype=getattr(torch, name))
    made = builder(tensor).group("full", num_blocks=2, block_size=4)
    component = made.component("full", layer=0, name="k", array=tensor, axes=AXES).build().components[0]
    assert (component.dtype, component.itemsize) == (name, tensor.element_size())


def test_an_axis_split_in_two_is_named_twice() -> None:
    tensor = torch.zeros((2, 3, 2, 4, 2), dtype=torch.bfloat16)  # block, head, dim/x, slot, x
    made = builder(tensor).group("full", num_blocks=2, block_size=4)
    axes = ("block", "head", "dim", "slot", "dim")
    manifest = made.component("full", layer=0, name="k", array=tensor, axes=axes).build()
    assert manifest.components[0].extent("dim") == 4
    assert manifest.components[0].extent("layer") == 1


def test_the_builder_keeps_windows_and_token_shards() -> None:
    tensor = np.zeros((2, 4, 2), dtype=np.float16)
    shard = TokenShard(rank=1, size=2, interleave=16)
    made = builder(tensor).group("local", num_blocks=2, block_size=4, window=6, token_shard=shard)
    manifest = made.component("local", layer=0, name="kv", array=tensor, axes=("block", "slot", "dim")).build()
    assert (manifest.group("local").window, manifest.group("local").token_shard) == (6, shard)


def test_the_builder_describes_states() -> None:
    tensor = np.zeros((3, 4, 2), dtype=np.float32)
    made = builder(tensor).group("state", kind="state", num_blocks=3)
    manifest = made.component("state", layer=0, name="ssm", array=tensor, axes=("block", "chan", "dim")).build()
    assert manifest.group("state").kind == "state"


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: ModelInfo(name="m", fingerprint=""), "ModelInfo.fingerprint"),
        (lambda: Shard(axis="head", start=-1, total=4), "Shard.start"),
        (lambda: TokenShard(size=0), "TokenShard.size"),
    ],
)
def test_a_part_that_python_makes_wrong_is_named_as_one_that_is_read(build: Callable[[], object], field: str) -> None:
    with refused("malformed_manifest", ManifestError, field=field):
        build()


def test_axis_names_have_to_match_the_dimensions() -> None:
    tensor = np.zeros((2, 4, 2), dtype=np.float16)
    with pytest.raises(ManifestError, match="4 axis names for an array of 3 dimensions"):
        builder(tensor).component("full", layer=0, name="k", array=tensor, axes=AXES)


def test_an_array_lies_in_the_region_that_has_its_address() -> None:
    memory = np.zeros((2, 8, 4, 2), dtype=np.float16)
    made = builder(memory[0]).region(1, "host", nbytes=memory[1].nbytes, address=memory[1].ctypes.data)
    made.group("full", num_blocks=8, block_size=4)
    for layer in (1, 0):
        made.component("full", layer=layer, name="k", array=memory[layer], axes=("block", "slot", "dim"))
    assert [(each.region, each.offset) for each in made.build().components] == [(1, 0), (0, 0)]


def test_a_region_has_to_be_described_first() -> None:
    tensor = np.zeros((2, 4, 2), dtype=np.float16)
    with pytest.raises(ManifestError, match="region 3"):
        builder(tensor).component("full", layer=0, name="k", array=tensor, axes=("block", "slot", "dim"), region=3)


def test_an_array_outside_its_region_is_refused() -> None:
    inside = np.zeros((8, 4, 2), dtype=np.float16)
    made = builder(inside[4:]).group("full", num_blocks=8, block_size=4)
    with pytest.raises(ManifestError) as before:
        made.component("full", layer=0, name="k", array=inside, axes=("block", "slot", "dim")).build()
    assert before.value.code == "malformed_manifest", "it begins before the region: a negative offset"
    short = builder(inside, nbytes=inside.nbytes - 1).group("full", num_blocks=8, block_size=4)
    with refused("out_of_region", ManifestError):
        short.component("full", layer=0, name="k", array=inside, axes=("block", "slot", "dim")).build()


def test_an_array_that_runs_backwards_or_repeats_itself_is_refused() -> None:
    memory = np.zeros((2, 4, 2), dtype=np.float16)
    for view in (memory[:, ::-1], np.broadcast_to(memory[:, :1], (2, 4, 2))):
        made = builder(memory).group("full", num_blocks=2, block_size=4)
        with pytest.raises(ManifestError):
            made.component("full", layer=0, name="k", array=view, axes=("block", "slot", "dim")).build()


@pytest.mark.parametrize(
    ("dtype", "encoding", "meaning"),
    [
        ("bfloat16", None, "bf16"), ("float8_e4m3fn", None, "fp8_e4m3fn"), ("uint8", "fp8_e4m3fn", "fp8_e4m3fn"),
        ("float8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3fn"), ("int16", "bf16", "bf16"), ("int64", "int64", "int64"),
        ("uint8", None, "opaque:uint8"), ("bool", None, "opaque:bool"), ("bfloat16", "opaque:x.y", "opaque:x.y"),
    ],
)  # fmt: skip
def test_what_bytes_mean_is_the_encoding_or_what_a_float_dtype_says(
    dtype: str, encoding: str | None, meaning: str
) -> None:
    part = cache(array(block=2, slot=2, head=1, dim=2, dtype=dtype, encoding=encoding)).components[0]
    assert part.meaning == meaning
    assert part.undivided == ({"slot", "head", "dim"} if meaning.startswith("opaque:") else set())


def test_every_dtype_that_says_what_it_means_says_an_encoding_of_its_width() -> None:
    assert {dtype for dtype in ITEMSIZE if "float" in dtype} == set(OF_DTYPE)
    assert all(ENCODINGS[encoding] == ITEMSIZE[dtype] for dtype, encoding in OF_DTYPE.items())
    assert not ENCODINGS.keys() & (ALIASES.keys() - OF_DTYPE.keys()), "one name for each"


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("fp8", "fp8_e4m3fn"), ("fp8_e4m3", "fp8_e4m3fn"), ("float8_e5m2", "fp8_e5m2"), ("fp8_e5m2", "fp8_e5m2"),
        ("bfloat16", "bf16"), ("half", "fp16"), ("fp8_ds_mla", "fp8_ds_mla"),
        ("turboquant_k8v4", "opaque:vllm.turboquant_k8v4"),
    ],
)  # fmt: skip
def test_engines_names_for_one_thing_are_one_encoding(name: str, encoding: str) -> None:
    assert encoding_of(name, "vllm") == encoding


def test_the_builder_says_what_bytes_mean_and_what_stays_whole() -> None:
    raw = np.zeros((2, 4, 2, 3), dtype=np.uint8)
    made = builder(raw).group("full", num_blocks=2, block_size=4)
    made.component("full", layer=0, name="k", array=raw, axes=AXES, encoding="nvfp4", whole=["dim"])
    part = made.build().components[0]
    assert (part.encoding, part.whole, part.undivided) == ("nvfp4", ("dim",), {"dim"})
