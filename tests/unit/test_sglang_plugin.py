"""What of SGLang's plug-in needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvferry.errors import KvferryError  # noqa: E402
from kvferry.manifest import ManifestBuilder, ModelInfo  # noqa: E402
from kvferry.memory import memfd_region  # noqa: E402
from kvferry.memory.placing import buffers_of, placed, region_nbytes  # noqa: E402
from kvferry.sglang.cache import GROUP, describe  # noqa: E402
from kvferry.sglang.options import Options  # noqa: E402


def test_an_unknown_variable_is_refused_by_name() -> None:
    with pytest.raises(KvferryError, match="KVFERRY_SGLANG_SOCKETS") as refused:
        Options.read({"KVFERRY_SGLANG_SOCKETS": "/run/x.sock", "PATH": "/bin"})
    assert refused.value.code == "bad_option"


def test_ranks_that_would_share_a_daemon_are_refused() -> None:
    assert Options.read({"KVFERRY_SGLANG_SOCKET": "/run/{rank}.sock"}).socket_of(1, 2) == "/run/1.sock"
    with pytest.raises(KvferryError, match="a daemon of its own"):
        Options.read({"KVFERRY_SGLANG_SOCKET": "/run/one.sock"}).socket_of(1, 2)


def create(pool: Any) -> None:
    """As SGLang's pools do: keys and values are halves of one tensor per layer."""
    fused = [torch.zeros((2, 48, 2, 8), dtype=torch.float32, device="cpu") for _ in range(2)]
    pool.k_buffer, pool.v_buffer = [each[0] for each in fused], [each[1] for each in fused]


def test_a_pool_is_placed_in_the_region_and_described_there() -> None:
    pool = SimpleNamespace(page_size=16, size=32, layer_num=2, start_layer=0, kv_cache_layout="nhd")
    buffers = buffers_of(lambda: create(pool))
    region = memfd_region(region_nbytes(buffers, "cpu"))
    with placed(region, buffers):
        create(pool)
    pool.v_buffer[1][16:32] = 7.0  # page 1
    place = range(region.address, region.address + region.nbytes)
    assert all(buffer.data_ptr() in place for buffer in pool.k_buffer + pool.v_buffer)

    builder = ManifestBuilder("engine", "epoch", ModelInfo(name="m", fingerprint="f"), rank=1, world_size=2)
    builder.region(0, "host", nbytes=region.nbytes, address=region.address)
    describe(builder, pool, 1, 2, heads=4)
    manifest = builder.build()
    assert [(group.name, group.block_size, group.num_blocks) for group in manifest.groups] == [(GROUP, 16, 3)]
    value = next(each for each in manifest.components if (each.layer, each.name) == (1, "v"))
    assert [axis.name for axis in value.axes] == ["block", "slot", "head", "dim"]
    assert value.shard is not None and (value.shard.start, value.shard.total) == (2, 4)
    at = value.offset + value.axes[0].stride
    assert region.array()[at : at + 4].view("float32")[0] == 7.0


def test_an_unknown_layout_is_refused_by_name() -> None:
    pool = SimpleNamespace(page_size=16, size=32, layer_num=2, start_layer=0, kv_cache_layout="vectorized_5d")
    create(pool)
    with pytest.raises(KvferryError, match="vectorized_5d"):
        describe(ManifestBuilder("e", "e", ModelInfo(name="m", fingerprint="f")), pool, 0, 1, heads=2)
