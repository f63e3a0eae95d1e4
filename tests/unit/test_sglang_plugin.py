"""The parts of SGLang's plug-in that need no SGLang."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import refused

torch = pytest.importorskip("torch")

from kvferry.errors import KvferryError  # noqa: E402
from kvferry.fingerprint import model_fingerprint  # noqa: E402
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo  # noqa: E402
from kvferry.memory import memfd_region  # noqa: E402
from kvferry.memory.placing import buffers_of, placed, region_nbytes  # noqa: E402
from kvferry.sglang import patches  # noqa: E402
from kvferry.sglang.cache import GROUP, describe, scales  # noqa: E402
from kvferry.sglang.options import Options  # noqa: E402
from kvferryd.plan import PlanRefused, plan  # noqa: E402


def test_an_unknown_variable_is_refused_by_name() -> None:
    with refused("bad_option", match="KVFERRY_SGLANG_SOCKETS"):
        Options.read({"KVFERRY_SGLANG_SOCKETS": "/run/x.sock", "PATH": "/bin"})


def test_ranks_that_would_share_a_daemon_are_refused() -> None:
    assert Options.read({"KVFERRY_SGLANG_SOCKET": "/run/{rank}.sock"}).socket_of(1, 2) == "/run/1.sock"
    with pytest.raises(KvferryError, match="a daemon of its own"):
        Options.read({"KVFERRY_SGLANG_SOCKET": "/run/one.sock"}).socket_of(1, 2)
    both = Options.read({"KVFERRY_SGLANG_SOCKET": "/run/{dp_rank}-{rank}.sock"})
    assert both.socket_of(1, 2, 3, 4) == "/run/3-1.sock"
    with pytest.raises(KvferryError, match=r"by \{dp_rank\}"):
        Options.read({"KVFERRY_SGLANG_SOCKET": "/run/{rank}.sock"}).socket_of(0, 2, 1, 2)


POOL = {"page_size": 16, "size": 32, "model_layer_ids": (0, 1)}


def create(pool: Any) -> None:
    """As SGLang's pools do: keys and values are halves of one tensor per layer."""
    fused = [torch.zeros((2, 48, 2, 8), dtype=torch.float32, device="cpu") for _ in range(2)]
    pool.k_buffer, pool.v_buffer = [each[0] for each in fused], [each[1] for each in fused]


def test_a_pool_is_placed_in_the_region_and_described_there() -> None:
    pool = SimpleNamespace(**POOL, kv_cache_layout="nhd", dtype=torch.float32)
    buffers = buffers_of(lambda: create(pool))
    region = memfd_region(region_nbytes(buffers, "cpu"))
    with placed(region, buffers):
        create(pool)
    pool.v_buffer[1][16:32] = 7.0  # page 1
    place = range(region.address, region.address + region.nbytes)
    assert all(buffer.data_ptr() in place for buffer in pool.k_buffer + pool.v_buffer)

    builder = ManifestBuilder("engine", "epoch", ModelInfo(name="m", fingerprint="f"), rank=1, world_size=2)
    builder.region(0, "host", nbytes=region.nbytes, address=region.address)
    describe(builder, pool, 0, 1, 2, lambda layer: 4, "auto")
    manifest = builder.build()
    assert [(group.name, group.block_size, group.num_blocks) for group in manifest.groups] == [(GROUP, 16, 3)]
    value = next(each for each in manifest.components if (each.layer, each.name) == (1, "v"))
    assert [axis.name for axis in value.axes] == ["block", "slot", "head", "dim"]
    assert value.shard is not None and (value.shard.start, value.shard.total) == (2, 4)
    at = value.offset + value.axes[0].stride
    assert region.array()[at : at + 4].view("float32")[0] == 7.0


def test_an_unknown_layout_is_refused_by_name() -> None:
    pool = SimpleNamespace(**POOL, kv_cache_layout="vectorized_5d", dtype=torch.float32)
    create(pool)
    with pytest.raises(KvferryError, match="vectorized_5d"):
        described(pool)


def described(pool: Any, cache_dtype: str = "auto", heads: int = 2) -> Manifest:
    """The manifest of one rank, whose buffers lie anywhere."""
    builder = ManifestBuilder("e", "e", ModelInfo(name="m", fingerprint="f"))
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer
    start = min(buffer.data_ptr() for buffer in buffers)
    stop = max(buffer.data_ptr() + buffer.nbytes for buffer in buffers)
    describe(
        builder.region(0, "host", nbytes=stop - start, address=start), pool, 0, 0, 1, lambda layer: heads, cache_dtype
    )
    return builder.build()


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "stored", "means"),
    [
        ("auto", "float32", "float32", "fp32"),
        ("auto", "bfloat16", "bfloat16", "bf16"),
        ("bf16", "bfloat16", "bfloat16", "bf16"),
        ("auto", "float8_e4m3fn", "uint8", "fp8_e4m3fn"),  # by the checkpoint
        ("fp8_e4m3", "float8_e4m3fn", "uint8", "fp8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2", "uint8", "fp8_e5m2"),
        ("fp8_e5m2", "float8_e4m3fnuz", "uint8", "fp8_e4m3fnuz"),  # on ROCm
        ("mxfp8", "float8_e4m3fn", "float8_e4m3fn", "opaque:sglang.mxfp8"),
        ("nvfp4", "float4_e2m1fn_x2", "uint8", "opaque:sglang.nvfp4"),
        ("auto", "uint8", "uint8", "opaque:sglang.uint8"),
        ("tomorrow", "bfloat16", "bfloat16", "opaque:sglang.tomorrow"),
    ],
)
def test_a_cache_type_is_said_by_its_meaning_and_never_by_its_width(
    cache_dtype: str, dtype: str, stored: str, means: str
) -> None:
    pool = SimpleNamespace(**POOL, kv_cache_layout="nhd", dtype=f"torch.{dtype}")
    memory = torch.zeros((2, 2, 48, 2, 8), dtype=getattr(torch, stored))
    pool.k_buffer, pool.v_buffer = list(memory[0]), list(memory[1])
    assert {component.meaning for component in described(pool, cache_dtype).components} == {means}


@pytest.mark.parametrize(("packed", "means"), [(False, "fp8_e4m3fn"), (True, "opaque:sglang.packed_fp8_e4m3")])
def test_latent_rows_that_pack_scales_are_opaque(packed: bool, means: str) -> None:
    pool = SimpleNamespace(**POOL, dtype=torch.float8_e4m3fn, dsa_kv_cache_store_fp8=packed)
    pool.kv_buffer = list(torch.zeros((2, 48, 1, 24), dtype=torch.uint8))
    assert {component.meaning for component in described(pool, "fp8_e4m3").components} == {means}


def test_a_layer_whose_heads_are_not_those_of_the_model_is_refused_by_number() -> None:
    pool = SimpleNamespace(**POOL, kv_cache_layout="nhd", dtype=torch.float32)
    create(pool)
    with refused("unknown_heads", match=r"layer 0 has 4 KV heads, and each of 1 ranks keeps \[2\]"):
        described(pool, heads=4)


def test_fp8_by_other_scales_is_of_another_model(tmp_path: Path) -> None:
    """The bytes of a layer mean nothing without its scale, which SGLang may read from a file of its own."""
    files = [tmp_path / name for name in ("a", "copied", "b", "none")]
    for file, content in zip(files, ("{1}", "{1}", "{2}"), strict=False):
        file.write_text(content)

    def fingerprint(cache_dtype: str, path: Path | None) -> str:
        config = {"heads": 2} | scales(cache_dtype, path and str(path))
        return model_fingerprint(config, "torch.bfloat16", None, name="m", revision=None)

    a, copied, b, missing, without = (fingerprint("fp8_e4m3", path) for path in (*files, None))
    assert a == copied and missing == without and len({a, b, without}) == 3
    assert fingerprint("bf16", files[0]) == fingerprint("bf16", None)  # SGLang has none there


def test_fp8_of_one_kind_is_not_handed_over_as_another() -> None:
    """Both lie in uint8."""
    held = torch.zeros((2, 2, 48, 2, 8), dtype=torch.uint8)
    manifests = {}
    for cache_dtype, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        pool = SimpleNamespace(**POOL, kv_cache_layout="nhd", dtype=dtype)
        pool.k_buffer, pool.v_buffer = list(held[0]), list(held[1])
        manifests[cache_dtype] = described(pool, cache_dtype)
    assert plan([manifests["fp8_e4m3"]], manifests["fp8_e4m3"]).copies
    with pytest.raises(PlanRefused) as refused:
        plan([manifests["fp8_e4m3"]], manifests["fp8_e5m2"])
    assert {(each.code, each.source, each.destination) for each in refused.value.refusals} == {
        ("encoding", "fp8_e4m3fn", "fp8_e5m2")
    }


@pytest.mark.parametrize(("storage", "since"), [("", 8), ("enable_hicache_storage", 1), ("enable_lmcache", 1)])
def test_a_flush_leaves_what_a_storage_has(monkeypatch: pytest.MonkeyPatch, storage: str, since: int) -> None:
    """It was computed by weights that may have been replaced."""
    rank = SimpleNamespace(weights=SimpleNamespace(step=7), cached_since=1)
    monkeypatch.setattr(patches, "_rank", lambda: rank)
    scheduler = SimpleNamespace(enable_hicache_storage=False, enable_lmcache=False)
    if storage:
        setattr(scheduler, storage, True)
    patches._note_flush(False, scheduler)
    assert rank.cached_since == 1
    patches._note_flush(True, scheduler)
    assert rank.cached_since == since
