"""Parts that a plug-in finds in a layer's tensors, which ranks of any TP name and shard alike, and a layer's heads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import Malformed
from kvferry.vllm import heads
from support import refused

torch = pytest.importorskip("torch")

from kvferry.manifest import ManifestBuilder, ModelInfo  # noqa: E402
from kvferry.parts import Describing, Part, attention_parts, prove, recurrent_parts  # noqa: E402

HEADS, DIM, STATE, GROUPS = 4, 8, 16, 2


def mamba2(rank: int, ranks: int, groups: int) -> list[Part]:
    """A rank's own tensors: its heads' x, then the B and C of its groups; one group is copied to every rank."""
    own = max(1, groups // ranks)
    wide, narrow = HEADS // ranks * DIM, own * STATE
    conv = torch.zeros(5, wide + 2 * narrow, 3)
    ssm = torch.zeros(5, HEADS // ranks, DIM, STATE)
    return recurrent_parts(conv, [ssm], "xbc", ranks, min(ranks, groups))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_convolution_has_its_parts_whatever_the_tp(ranks: int, groups: int) -> None:
    for rank in range(ranks):
        held = {part.name: (part.view.shape[1], part.shard(rank, ranks)) for part in mamba2(rank, ranks, groups)}
        assert list(held) == ["conv.x", "conv.b", "conv.c", "ssm"]
        assert {name: shard.total for name, (_, shard) in held.items()} == {
            "conv.x": HEADS * DIM, "conv.b": groups * STATE, "conv.c": groups * STATE, "ssm": HEADS,
        }  # fmt: skip
        for name, (extent, shard) in held.items():
            copied = groups == 1 and name in {"conv.b", "conv.c"}
            assert shard.start == (0 if copied else rank * extent)


def test_the_parts_do_not_overlap() -> None:
    x, b, c, _ = mamba2(0, 1, GROUPS)
    ends = [(part.view.data_ptr(), part.view.shape[1]) for part in (x, b, c)]
    assert sum(channels for _, channels in ends) == HEADS * DIM + 2 * GROUPS * STATE
    assert ends[1][0] - ends[0][0] == ends[0][1] * 3 * 4
    assert ends[2][0] - ends[1][0] == ends[1][1] * 3 * 4


def test_a_gated_delta_net_has_its_values_last() -> None:
    conv, state = torch.zeros(5, 2 * 12 + HEADS * DIM, 3), torch.zeros(5, HEADS, DIM, STATE)
    parts = recurrent_parts(conv, [state], "qkv", 1, 1)
    assert [(part.name, part.view.shape[1]) for part in parts[:3]] == [
        ("conv.q", 12), ("conv.k", 12), ("conv.v", HEADS * DIM),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_linear_attention_has_a_state_and_no_convolution(ranks: int) -> None:
    state = torch.zeros(5, HEADS // ranks, DIM, DIM)
    for rank in range(ranks):
        (part,) = recurrent_parts(None, [state], "", ranks, ranks)
        shard = part.shard(rank, ranks)
        assert (part.name, part.axes) == ("ssm", ("block", "head", "dim", "n"))
        assert (shard.axis, shard.start, shard.total) == ("head", rank * HEADS // ranks, HEADS)


def test_keys_and_values_are_found_where_the_engine_writes_them() -> None:
    """All keys of a block transposed, then all values: no order that a shape would tell."""
    tokens, size = 4, 6
    memory = torch.zeros(3, 2 * HEADS * tokens * size)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        first, second = memory.view(3, 2, -1).unbind(1)
        for slot in slots.tolist():
            first.view(3, HEADS, size, tokens)[slot // tokens, :, :, slot % tokens] = keys[slot]
            second.view(3, HEADS, tokens, size)[slot // tokens, :, slot % tokens] = values[slot]

    k, v = attention_parts(write, memory, (tokens, HEADS), (size, size), torch.float32, "0", 1)
    assert dict(zip(k.axes, k.view.stride(), strict=True)) == {
        "block": 2 * HEADS * tokens * size, "slot": 1, "head": tokens * size, "dim": tokens,
    }  # fmt: skip
    assert dict(zip(v.axes, v.view.stride(), strict=True)) == {
        "block": 2 * HEADS * tokens * size, "slot": size, "head": tokens * size, "dim": 1,
    }  # fmt: skip
    assert not memory.any()


SLOTS, CELL = 4, 12


def packed(heads_first: bool = False) -> torch.Tensor:
    """[block, head, slot, byte], with the heads or the slots first in memory."""
    if heads_first:
        return torch.zeros(4, 2, SLOTS, CELL, dtype=torch.uint8)[:3]
    return torch.zeros(4, SLOTS, 2, CELL, dtype=torch.uint8).transpose(1, 2)[:3]


def cells(memory: torch.Tensor) -> list[Part]:
    axes = ("block", "head", "slot", "dim")
    return [
        Part("k", memory[..., :8], axes, "head", 1),
        Part("k.scale", memory[..., 8:].view(torch.float32), axes, "head", 1),
    ]


def put(memory: torch.Tensor, flags: torch.Tensor) -> None:
    """Another byte in each value, and another scale, where the flag is set."""
    memory[0, ..., :8] = torch.where(flags.T[..., None], 7, 3)
    memory[0, ..., 8:].view(torch.float32)[:] = torch.where(flags.T[..., None], 2.0, 1.0)


@pytest.mark.parametrize("heads_first", [True, False])
def test_cells_are_proven_by_what_changes_with_each_token_and_head(heads_first: bool) -> None:
    memory = packed(heads_first)
    memory[0] = 5
    prove(lambda flags: put(memory, flags), cells(memory), memory[0], "cells")
    assert bool((memory[0] == 5).all()), "block 0 is as it was"


def test_cells_that_lie_elsewhere_are_refused() -> None:
    memory = packed()
    heads_first = memory.as_strided(memory.shape, (2 * SLOTS * CELL, SLOTS * CELL, CELL, 1))
    beyond = memory.as_strided(memory.shape, memory.stride(), CELL)
    for described, why in ((heads_first, "theirs"), (beyond, "lie in their block")):
        with refused("unknown_layout", Malformed, match=why):
            prove(lambda flags: put(memory, flags), cells(described), memory[0], "cells")


def test_a_write_that_touches_more_than_the_cells_is_refused() -> None:
    memory = packed()
    with pytest.raises(Malformed, match="theirs"):
        prove(lambda flags: put(memory, flags), cells(memory)[:1], memory[0], "cells")


def test_cells_that_nobody_writes_are_refused() -> None:
    memory = packed()

    def values(flags: torch.Tensor) -> None:
        memory[0, ..., :8] = torch.where(flags.T[..., None], 7, 3)

    with pytest.raises(Malformed, match="never written"):
        prove(values, cells(memory), memory[0], "cells")


def test_parts_of_one_name_are_not_told_apart_by_their_order() -> None:
    memory = torch.zeros(2, 5, 4, HEADS, DIM)
    builder = ManifestBuilder("e", "1", ModelInfo(name="m", fingerprint="f"))
    builder.region(0, "host", nbytes=memory.nbytes, address=memory.data_ptr())
    builder.group("0", num_blocks=5, block_size=4)
    describing = Describing(builder, 0, 1)
    first, second = ([Part("kv", layer, ("block", "slot", "head", "dim"), "head", 1)] for layer in memory)
    describing.add("0", 7, first, "7.attn")
    describing.add("0", 8, second, "8.attn")
    with refused("unsupported_cache", Malformed, match=r"7\.attn and 7\.more both hold kv of layer 7"):
        describing.add("0", 7, second, "7.more")
    assert [component.label for component in builder.build().components] == ["7.kv", "8.kv"]


# ---- how many KV heads a layer of vLLM has: its own number, never that of the model ----


def model(total: int, **config: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: config)
    return SimpleNamespace(get_total_num_kv_heads=lambda: total, hf_text_config=text)


GEMMA_4 = model(16, num_key_value_heads=16, num_global_key_value_heads=4)
"""Gemma-4-31B: layers with windows have 16 KV heads, the others 4."""


@pytest.fixture(autouse=True)
def noted() -> Iterator[None]:
    heads.NOTED.clear()
    heads.NOTED["layers.0.self_attn"].add(16)
    heads.NOTED["layers.5.self_attn"].add(4)
    yield
    heads.NOTED.clear()


@pytest.mark.parametrize(
    ("ranks", "windowed", "full"), [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 4), (16, 16, 4), (32, 16, 4)]
)
def test_layers_with_different_numbers_of_heads_are_each_divided_by_their_own(
    ranks: int, windowed: int, full: int
) -> None:
    for name, total, shards in (("layers.0.self_attn.attn", 16, windowed), ("layers.5.self_attn.attn", 4, full)):
        assert heads.shards(name, max(1, total // ranks), ranks, GEMMA_4) == shards


def test_where_the_projection_says_nothing_the_configuration_may() -> None:
    assert heads.shards("other.attn", 1, 8, model(4, num_key_value_heads=4)) == 4
    assert heads.shards("other.attn", 1, 8, model(8)) == 8
    assert heads.shards("other.attn", 1, 8, model(8, id2label={0: "none"})) == 8


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(16, {"num_global_key_value_heads": 4}), (16, {"block_configs": [{"attention": {"num_key_value_heads": 2}}]})],
)
def test_a_number_that_cannot_be_known_is_refused_with_the_layers_name(ranks: int, config: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as refused:
        heads.shards("layers.7.attn", 1, ranks, model(16, **config))
    assert refused.value.code == "unknown_heads"
    assert "layers.7.attn" in str(refused.value)


def test_heads_that_every_rank_keeps_whole_are_not_divided() -> None:
    heads.NOTED["layers.3.attn"].add(6)
    assert heads.shards("layers.3.attn.kv", 6, 4, GEMMA_4) == 1


def test_more_heads_than_any_number_explains_are_refused() -> None:
    with refused("unknown_heads", Malformed):
        heads.shards("layers.7.attn", 3, 4, GEMMA_4)


def test_modules_of_one_name_with_different_numbers_are_refused() -> None:
    heads.NOTED["layers.0.self_attn"].add(2)
    with refused("unknown_heads", Malformed):
        heads.shards("layers.0.self_attn.attn", 1, 16, GEMMA_4)
