"""Parts that a plug-in finds in a layer's tensors, and that ranks of any TP name and shard alike."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvferry.errors import Malformed  # noqa: E402
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
        with pytest.raises(Malformed, match=why) as refused:
            prove(lambda flags: put(memory, flags), cells(described), memory[0], "cells")
        assert refused.value.code == "unknown_layout"


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
    with pytest.raises(Malformed, match=r"7\.attn and 7\.more both hold kv of layer 7") as refused:
        describing.add("0", 7, second, "7.more")
    assert refused.value.code == "unsupported_cache"
    assert [component.label for component in builder.build().components] == ["7.kv", "8.kv"]
