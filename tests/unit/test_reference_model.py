"""The reference engine's parts that need no process: model, layouts, weights, blocks, scheduling, text."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.handoff import Handoff, Origin, answer
from kvferry.manifest import Manifest
from kvferry.reference.cache import VIEW_AXES, CacheGeometry, RankShard, describe
from kvferry.reference.config import LAYOUTS, PRESETS, EngineConfig, ModelConfig, ModelSource, read_model_config
from kvferry.reference.daemons import Daemons, LoadFailed
from kvferry.reference.model import (
    Chunk,
    Decoder,
    SeededWeights,
    Weights,
    map_cache,
    shapes,
    weights_of,
    write_checkpoint,
)
from kvferry.reference.scheduler import BlockPool, Request, RequestState, Scheduler, prefix_hashes, step_input
from kvferry.reference.tokenizer import ByteTokenizer, TextStream
from kvferry.reference.workers import Start, Step
from kvferry.schemas import SourceBody
from support import refused

pytestmark = pytest.mark.anyio


TINY = PRESETS["tiny"]
SLIDING = replace(TINY, num_layers=3, window=11, sliding=(False, True, True))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_logits(config: ModelConfig, weights: Weights, tokens: list[int]) -> torch.Tensor:
    """An independent forward pass in float64: no pages, no shards, one head and one query at a time."""

    def read(name: str) -> torch.Tensor:
        return weights.read(f"model.{name}.weight").double()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)

    def rope(x: torch.Tensor) -> torch.Tensor:
        half = config.head_dim // 2
        out = torch.empty_like(x)
        for position in range(len(x)):
            for i in range(half):
                angle = torch.tensor(position * config.rope_theta ** (-2 * i / config.head_dim), dtype=torch.float64)
                a, b = x[position, i], x[position, i + half]
                out[position, i] = a * angle.cos() - b * angle.sin()
                out[position, i + half] = b * angle.cos() + a * angle.sin()
        return out

    x = read("embed_tokens")[tokens]
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        h = norm(x, read(f"{at}.input_layernorm"))
        q, k, v = (h @ read(f"{at}.self_attn.{name}_proj").T for name in "qkv")
        heads = []
        for head in range(config.num_heads):
            kv = head * config.num_kv_heads // config.num_heads
            part = slice(head * config.head_dim, (head + 1) * config.head_dim)
            kv_part = slice(kv * config.head_dim, (kv + 1) * config.head_dim)
            scores = rope(q[:, part]) @ rope(k[:, kv_part]).T / config.head_dim**0.5
            for i, j in itertools.product(range(len(tokens)), repeat=2):
                if j > i or (config.sliding[layer] and i - j >= config.window):
                    scores[i, j] = float("-inf")
            heads.append(scores.softmax(-1) @ v[:, kv_part])
        x = x + torch.cat(heads, -1) @ read(f"{at}.self_attn.o_proj").T
        h = norm(x, read(f"{at}.post_attention_layernorm"))
        gate, up = h @ read(f"{at}.mlp.gate_proj").T, h @ read(f"{at}.mlp.up_proj").T
        x = x + (gate * torch.sigmoid(gate) * up) @ read(f"{at}.mlp.down_proj").T
    head = read("embed_tokens") if config.tied else weights.read("lm_head.weight").double()
    return norm(x, read("norm")) @ head.T


class Alone:
    """A single rank and request at a time, without any scheduler."""

    def __init__(self, config: ModelConfig, weights: Weights, layout: str = "NHD", block_size: int = 16) -> None:
        geometry = CacheGeometry.of(config, EngineConfig(layout=layout, block_size=block_size, num_blocks=64), 0)
        self.region = torch.full((geometry.nbytes,), 0xFF, dtype=torch.uint8)  # every element a NaN until written
        self.caches = map_cache(self.region, geometry)
        self.decoder = Decoder(config, weights)
        self.table = torch.randperm(64, generator=torch.Generator().manual_seed(3))

    def logits(self, tokens: list[int], start: int, count: int) -> torch.Tensor:
        chunk = Chunk(start, count, self.table)
        out = self.decoder.step(
            torch.tensor(tokens[start : start + count]), [chunk], self.caches, torch.tensor([count - 1])
        )
        assert out is not None
        return out[0]

    def greedy(self, prompt: list[int], count: int, chunk: int = 10**6) -> tuple[list[int], list[float]]:
        """(generated tokens, distance of each from the runner-up)."""
        tokens, gaps, done = list(prompt), [], 0
        while len(tokens) < len(prompt) + count:
            logits = self.logits(tokens, done, min(chunk, len(tokens) - done))
            done += min(chunk, len(tokens) - done)
            if done == len(tokens):
                best = logits.topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :], gaps


def prompt(length: int, seed: int = 0, vocab: int = TINY.vocab_size) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=True), SLIDING], ids=["full", "tied", "sliding"])
def test_paged_logits_are_those_of_a_plain_forward_pass(config):
    weights = SeededWeights(config, seed=1)
    tokens = prompt(45)
    expected = plain_logits(config, weights, tokens)
    alone = Alone(config, weights, block_size=7)
    for start, count in [(0, 20), (20, 13), (33, 1), (34, 1), (35, 10)]:
        logits = alone.logits(tokens, start, count)
        torch.testing.assert_close(logits.double(), expected[start + count - 1], atol=2e-3, rtol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, "head block dim kv layer slot"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_every_layout_block_size_and_chunk_size_gives_the_same_tokens(layout, block_size):
    weights = SeededWeights(SLIDING, seed=2)
    tokens = prompt(40)
    expected, _ = Alone(SLIDING, weights).greedy(tokens, 8)
    assert Alone(SLIDING, weights, layout, block_size).greedy(tokens, 8, chunk=9)[0] == expected


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_seeded_weights_wander_and_decide_clearly(name):
    config = PRESETS[name]
    alone = Alone(config, SeededWeights(config, seed=0))
    tokens, gaps = alone.greedy(prompt(60, vocab=config.vocab_size), 64)
    assert len(set(tokens)) > 40, "a fixed point would hide a wrong cache"
    assert min(gaps) > 1e-3, "rounding is around 1e-5"


def test_one_head_of_one_block_with_another_tokens_kv_changes_what_is_generated():
    alone = Alone(TINY, SeededWeights(TINY, seed=0))
    tokens = prompt(100)
    right, _ = alone.greedy(tokens, 12)
    for layer, head, block in [(0, 0, 0), (0, 2, 4), (1, 1, 2)]:
        alone.logits(tokens, 0, 100)
        cache, here, there = alone.caches[layer], alone.table[block], alone.table[block + 1]
        for pages in (cache.k, cache.v):
            pages[here, :, head] = pages[there, :, head].clone()
        wrong = [*tokens, right[0]]
        while len(wrong) < 112:
            wrong.append(int(alone.logits(wrong, len(wrong) - 1, 1).argmax()))
        assert wrong[100:] != right, f"nothing depends on layer {layer}, head {head}, block {block}"


def test_seeded_weights_depend_on_seed_and_name_only():
    a, b = SeededWeights(TINY, 5), SeededWeights(TINY, 5)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(a.read(name), b.read(name))
    assert not torch.equal(a.read(name), SeededWeights(TINY, 6).read(name))
    assert not torch.equal(a.read(name), a.read("model.layers.0.self_attn.q_proj.weight"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_folder_reads_back_as_the_same_model(tmp_path, shards, tied):
    source = ModelSource(replace(TINY, tied=tied), seed=4)
    write_checkpoint(source, tmp_path, shards=shards)
    loaded = ModelSource(read_model_config(tmp_path / "config.json"), tmp_path)
    assert loaded.config == source.config
    for name, shape in shapes(source.config):
        assert weights_of(loaded).read(name).shape == shape
        assert torch.equal(weights_of(loaded).read(name), weights_of(source).read(name))
    tokens = prompt(20)
    expected, _ = Alone(source.config, weights_of(source)).greedy(tokens, 6)
    assert Alone(loaded.config, weights_of(loaded)).greedy(tokens, 6)[0] == expected


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(tmp_path):
    write_checkpoint(ModelSource(TINY), tmp_path)
    config = replace(TINY, num_layers=3, sliding=())
    with refused("malformed_checkpoint", match=r"model\.layers\.2\.input_layernorm\.weight"):
        weights_of(ModelSource(config, tmp_path))


def test_fingerprints_tell_models_apart_and_ignore_how_they_are_served(tmp_path):
    write_checkpoint(ModelSource(TINY, seed=1), tmp_path / "a")
    write_checkpoint(ModelSource(TINY, seed=2), tmp_path / "b")
    write_checkpoint(ModelSource(TINY, seed=1), tmp_path / "elsewhere" / "a")
    a, b, again = (ModelSource(TINY, tmp_path / name).fingerprint() for name in ("a", "b", "elsewhere/a"))
    assert a == again
    assert len({a, b, ModelSource(TINY).fingerprint(), ModelSource(TINY, seed=1).fingerprint()}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("attention_bias", True), ("hidden_act", "gelu"), ("architectures", ["GPT2LMHeadModel"]), ("head_dim", 15)],
)
def test_a_model_that_is_not_this_one_is_refused_by_field(field, value):
    with refused("unsupported_model", field=field):
        ModelConfig.from_hf(TINY.to_hf() | {field: value})


def test_what_config_json_calls_by_a_name_of_ours_is_not_ours():
    theirs = TINY.to_hf() | {"dtype": "bfloat16", "window": 7, "tied": True, "num_heads": 1}
    assert ModelConfig.from_hf(theirs) == TINY


def test_the_theta_of_rope_parameters_counts():
    theirs = TINY.to_hf() | {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}
    assert ModelConfig.from_hf(theirs).rope_theta == 500000.0


@pytest.mark.parametrize("tp", range(1, 13))
def test_every_query_head_has_one_rank_which_holds_its_kv_head(tp):
    config = PRESETS["demo"]
    ranks = [RankShard.of(config, rank, tp) for rank in range(tp)]
    assert sorted(head for rank in ranks for head in rank.heads) == list(range(12))
    assert sorted(column for rank in ranks for column in rank.columns) == list(range(1024))
    for rank in ranks:
        assert {head // 2 for head in rank.heads} == set(rank.kv_heads)


def test_kv_heads_that_do_not_divide_are_shared_out_unequally():
    held = [RankShard.of(PRESETS["demo"], rank, 4).kv_heads for rank in range(4)]
    assert [len(heads) for heads in held] == [2, 2, 1, 1]
    with pytest.raises(KvferryError):
        RankShard.of(PRESETS["demo"], 0, 13)


@pytest.mark.parametrize("layout", [*LAYOUTS, "head,block,dim,kv,layer,slot"])
def test_the_manifest_describes_the_memory_that_the_model_writes(layout):
    engine = EngineConfig(layout=layout, block_size=4, num_blocks=6, tp=2)
    geometry = CacheGeometry.of(SLIDING, engine, 1)
    region = torch.zeros(geometry.nbytes, dtype=torch.uint8)
    caches = map_cache(region, geometry)
    described = describe(ModelSource(SLIDING), engine, 1, epoch="e", region=region, caches=caches)
    manifest = Manifest.from_json(described.to_json())
    assert {group.name: group.window for group in manifest.groups} == {"full": None, "window": 11}
    seen = []
    for component in manifest.components:
        assert [axis.name for axis in component.axes] == list(VIEW_AXES)
        assert (component.shard.start, component.shard.total) == (2, 3)
        array = np.ndarray(
            [axis.extent for axis in component.axes],
            np.float32,
            region.numpy(),
            component.offset,
            [axis.stride for axis in component.axes],
        )
        cache = getattr(caches[component.layer], component.name)
        values = torch.rand(cache.shape)
        cache.copy_(values)
        seen.append((array, values))
    for array, values in seen:  # after all were written: no two share a byte
        assert np.array_equal(array, values.numpy())
    assert sum(values.numel() * 4 for _, values in seen) == geometry.nbytes


def test_a_layout_must_order_all_six_axes():
    with pytest.raises(KvferryError, match="six cache axes"):
        CacheGeometry.of(TINY, EngineConfig(layout="block slot head dim"), 0)


def test_prefix_hashes_cover_full_blocks_and_everything_before_them():
    a, b = list(prefix_hashes([1, 2, 3, 4, 5], 2)), list(prefix_hashes([9, 2, 3, 4], 2))
    assert len(a) == 2
    assert not set(a) & set(b)


def remembering(num_blocks):
    """(a pool, three blocks of it that are free again, the hashes of the prefix that they hold)"""
    pool, hashes = BlockPool(num_blocks), list(prefix_hashes(range(6), 2))
    blocks = pool.take([], 3)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.remember(block, digest)
    pool.release(blocks)
    return pool, blocks, hashes


def test_a_known_prefix_survives_its_holder_until_its_blocks_are_needed():
    pool, first, hashes = remembering(4)
    assert pool.find(hashes) == first
    again = pool.take(pool.find(hashes[:2]), 1)
    assert again[:2] == first[:2]
    assert pool.take([], 2) is None, "one block is left"
    pool.release(again)
    assert pool.num_free == 4
    assert pool.take([], 4) is not None
    assert pool.find(hashes) == []


def test_the_end_of_a_prefix_is_reused_before_its_beginning():
    pool, blocks, hashes = remembering(3)
    pool.take([], 1)
    assert pool.find(hashes) == blocks[:2]


def request(length: int, max_tokens: int = 4, **more) -> Request:
    return Request(request_id=f"r{length}", prompt=prompt(length, seed=length), max_tokens=max_tokens, **more)


def run(scheduler: Scheduler, token: int = 7) -> list[int]:
    """Take a step; the number of tokens of each request in it."""
    step = scheduler.schedule()
    sampled = [token for entry in step if entry.samples]
    return [entry.count for entry in scheduler.complete(sampled)]


def test_decode_goes_before_prefill_and_prefill_comes_in_chunks():
    scheduler = Scheduler(EngineConfig(max_tokens_per_step=10))
    first, second = request(4), request(25)
    scheduler.add(first)
    scheduler.admit()
    assert run(scheduler) == [4]
    scheduler.add(second)
    scheduler.admit()
    assert [run(scheduler) for _ in range(4)] == [[1, 9], [1, 9], [1, 7], [1]]
    assert first.finish_reason == "length"
    assert first.left.is_set()


def test_a_request_waits_for_blocks_and_gets_them_when_another_is_released():
    scheduler = Scheduler(EngineConfig(num_blocks=4, block_size=8))
    first, second = request(20, max_tokens=1), request(21, max_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)
    run(scheduler)
    scheduler.release(first)
    scheduler.admit()
    assert second.state is RequestState.RUNNING


def test_blocks_of_a_cancelled_request_are_kept_until_its_step_is_over():
    scheduler = Scheduler(EngineConfig())
    cancelled = request(20)
    scheduler.add(cancelled)
    scheduler.admit()
    scheduler.schedule()
    scheduler.cancel(cancelled)
    assert not cancelled.left.is_set()
    scheduler.complete([7])
    assert cancelled.left.is_set()
    assert cancelled.generated == []
    scheduler.release(cancelled)
    assert scheduler.pool.num_free == 512


def test_a_held_request_keeps_only_blocks_with_kv():
    scheduler = Scheduler(EngineConfig(block_size=4))
    held = request(9, max_tokens=100, hold=True, stop_token_ids=frozenset({7}))
    scheduler.add(held)
    scheduler.admit()
    run(scheduler)
    assert held.finish_reason == "stop"
    scheduler.hold(held)
    assert len(held.blocks) == 3


def test_the_prefix_cache_never_covers_a_whole_prompt():
    scheduler = Scheduler(EngineConfig(block_size=4))
    first, again = request(8), request(8)
    scheduler.add(first)
    scheduler.admit()
    run(scheduler)
    scheduler.add(again)
    scheduler.admit()
    assert again.cached == 4
    assert again.blocks[0] == first.blocks[0]


def test_a_step_survives_the_pipe():
    scheduler = Scheduler(EngineConfig(max_tokens_per_step=12))
    for length in (5, 9):
        scheduler.add(request(length))
    scheduler.admit()
    sent = step_input(scheduler.schedule())
    assert (sent.counts, sent.sample) == ([5, 7], [True, False])
    assert Step.model_validate_json(sent.model_dump_json()) == sent


def test_a_worker_gets_the_whole_configuration(tmp_path):
    engine = EngineConfig(tp=2, layout="HND", daemons=("a", "b"))
    source = ModelSource(SLIDING, tmp_path, 3)
    start = Start(source=source, engine=engine, rank=1, epoch="e", rendezvous="rendezvous", region=("file", 4096))
    assert Start.model_validate_json(start.model_dump_json()) == start


def test_text_comes_in_pieces_that_are_never_taken_back():
    tokenizer = ByteTokenizer(512)
    text = TextStream(tokenizer, stop=["STOP"])
    tokens = list("é STOxSTOP more".encode())
    pieces = [text.feed([token], last=False) for token in tokens[:-5]]
    assert "".join(pieces) == "é STOx"
    assert text.stops(tokens)
    assert text.feed([], last=True) == ""


def test_bytes_are_the_tokenizer_of_a_folder_without_one():
    tokenizer = ByteTokenizer(300)
    assert tokenizer.encode("hé") == [256, *"hé".encode()]
    assert tokenizer.decode([*tokenizer.encode("hé"), 290, 257]) == "hé<290>"
    with pytest.raises(KvferryError, match="token ids"):
        ByteTokenizer(100).encode("a")


def test_what_prefill_answers_is_what_decode_accepts():
    sent = answer(
        engine_id="p", epoch="e1", address="[::1]:7411", request_id="r", lease=3, block_ids=[[4, 7]], num_tokens=20,
        tp=2, second_turn=False,
    )  # fmt: skip
    got = Handoff.parse(json.loads(sent.model_dump_json()) | {"x-router": "anything"})
    origin = got.origin("other-id", 20, bytes)
    assert (origin.request_id, origin.num_tokens) == ("r", 20)
    assert (origin.source.engine_id, origin.source.address) == ("p", "[::1]:7411")
    assert (origin.source.epoch, origin.source.lease) == ("e1", 3)


def test_a_prefill_request_without_a_source_reads_nothing():
    empty = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    assert Handoff.parse(empty | {"remote_host": None, "remote_port": None}).origin("r", 5, bytes) is None


def test_a_router_may_order_the_transfer_instead():
    origin = Handoff.parse({"do_remote_prefill": True, "order": "router"}).origin("r", 5, bytes)
    assert (origin.request_id, origin.num_tokens, origin.source) == ("r", 5, None)


# ---- the end of a load on several ranks, of which one fails and the others hear of it ----


HEARD = {
    "refused as its attempt is over": Conflict("aborted", "attempt 1 of request r has ended on another rank"),
    "ended with it": PeerFailed("rank_failed", "rank 1 of the same engine failed"),
}


@pytest.mark.parametrize("heard", HEARD.values(), ids=HEARD.keys())
async def test_a_load_fails_with_the_reason_of_the_rank_that_failed_by_itself(heard: KvferryError) -> None:
    """Also where another rank hears of it first."""
    told = asyncio.Event()

    class First:
        async def receive(self, *_: object, **__: object) -> None:
            told.set()
            raise heard

    class Second:
        async def receive(self, *_: object, **__: object) -> None:
            await told.wait()
            await asyncio.sleep(0)
            raise Conflict("other_prompt", "it is that of another prompt")

    engine, ranks = SimpleNamespace(load_timeout_s=60.0), [First(), Second()]
    daemons = Daemons(engine, ranks, AsyncExitStack())  # type: ignore[arg-type]
    origin = Origin("r", 1, SourceBody(engine_id="p", address="127.0.0.1:1"))
    with refused("other_prompt", LoadFailed):
        await daemons.receive(origin, {}, (0, 1))
