"""Play runs, drawn from seeds, of vLLM's own scheduler with the connector's scheduler side, over memory that remembers
which tokens were written to it. Print what was wrong in each seed, and what came about. Run by the Python that vLLM is
installed for.

.venv-engines/bin/python tests/engines/scheduled_runs.py FIRST_SEED COUNT
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.handoff import Handoff
from kvferry.vllm import register
from kvferry.vllm.step import Address, Load, Publish, Step

BLOCK, BLOCKS, LONGEST, STOP_TOKEN = 4, 40, 128, 3
WINDOW, CHUNK = 10, 12
"""Tokens: of a sliding window; of attention in chunks."""
STEPS, MORE_STEPS = 60, 3000
"""With new requests in most of them; at most until all of these are over."""
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
LONGER: dict[str, Any] = SHAPE | {"block_size": 2 * BLOCK}
STATE: dict[str, Any] = {"shapes": ((2, 8),), "dtypes": (torch.float32,)}
BESIDE = {
    "": None, "windows": SlidingWindowSpec(**SHAPE, sliding_window=WINDOW),
    "chunks": ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=CHUNK),
    "longer blocks": FullAttentionSpec(**LONGER),
    "windows in longer blocks": SlidingWindowSpec(**LONGER, sliding_window=WINDOW),
    "states": MambaSpec(**STATE, block_size=LONGEST),
    "cached states": MambaSpec(**STATE, block_size=BLOCK, mamba_cache_mode="align"),
}  # fmt: skip
"""The second group of a cache. vLLM caches states where it makes a block of them for each block of tokens."""
WHOLE = -1
"""The slot of a state, which takes all of its block."""


def looks_back(kind: str, token: int) -> int:
    """The oldest token that this one needs in the second group."""
    if kind == "longer blocks":
        return 0
    return token // CHUNK * CHUNK if kind == "chunks" else max(0, token - WINDOW + 1)


def written(tokens: list[int], position: int) -> int:
    """The KV of one token depends on all before it."""
    return hash(tuple(tokens[: position + 1]))


@dataclass(eq=False)
class Loading:
    load: Load
    prompt: list[int]
    steps_left: int
    cancelled: bool = False


@dataclass(eq=False)
class Lease:
    """published: how many of the tokens it has, without what its last block has room for."""

    publish: Publish
    tokens: list[int]
    published: int
    steps_left: int | None = None
    """Once its blocks are held for a reader."""


@dataclass(eq=False)
class Sent:
    """A step on its way to the worker. scheduled: of each request its first token, their count, its blocks, and the
    tokens that the scheduler knows."""

    step: Step
    output: SchedulerOutput
    scheduled: dict[str, tuple[int, int, tuple[list[int], ...], list[int]]]


class World:
    """A scheduler, and a worker without a model: both are a step apart where scheduling is asynchronous."""

    def __init__(self, seed: int, model: str) -> None:
        self.chance = chance = random.Random(seed)
        self.kind, self.in_flight = chance.choice(list(BESIDE)), chance.choice((1, 2))
        beside = BESIDE[self.kind]
        self.has_state = isinstance(beside, MambaSpec)
        self.sizes = BLOCK, beside.block_size if beside is not None else BLOCK
        """Tokens for which a group has a block."""
        cached = chance.random() < 0.8 if not self.has_state else self.kind == "cached states"
        extra = {"progressive": chance.random() < 0.5, "second_turn": chance.random() < 0.5}
        config = VllmConfig(
            model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST),
            scheduler_config=SchedulerConfig(
                max_model_len=LONGEST, is_encoder_decoder=False, max_num_seqs=6, max_num_batched_tokens=32,
                async_scheduling=self.in_flight > 1, scheduler_reserve_full_isl=False,
            ),
            cache_config=CacheConfig(
                block_size=BLOCK, enable_prefix_caching=cached,
                mamba_cache_mode=getattr(beside, "mamba_cache_mode", "none"),
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvferryConnector", kv_role="kv_both", engine_id="d", kv_connector_extra_config=extra,
                kv_load_failure_policy=chance.choice(("recompute", "fail")),
            ),
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = BLOCKS
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**SHAPE))]
        if beside is not None:
            groups.append(KVCacheGroupSpec(["beside"], beside))
        aligned, self.hashed = max(self.sizes), max(self.sizes) if self.kind == "states" else BLOCK
        self.scheduler = (AsyncScheduler if self.in_flight > 1 else Scheduler)(
            vllm_config=config, kv_cache_config=KVCacheConfig(BLOCKS, [], groups, hash_block_size=self.hashed),
            structured_output_manager=StructuredOutputManager(config), block_size=aligned, hash_block_size=self.hashed,
        )  # fmt: skip
        self.side = self.scheduler.connector._scheduler
        self.side.reached_at({(0, 0): Address("127.0.0.1:9")})
        self.memory: dict[tuple[int, int], int] = {}
        """The KV, by block and slot."""
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        """As the worker knows them, by request."""
        self.loading: dict[str, Loading] = {}
        self.leases: dict[str, Lease] = {}
        self.refused: list[str] = []
        self.sent: deque[Sent] = deque()
        self.happened: Counter[str] = Counter()
        self.requests = 0

    def play(self) -> None:
        busy = self.chance.random()
        for at in range(STEPS):
            if at < 0.7 * STEPS:
                self.clients(busy)
            self.turn()
        for _ in range(MORE_STEPS):
            if not (self.scheduler.has_requests() or self.sent or self.loading or self.leases):
                break
            self.turn()
        assert not self.scheduler.requests and not self.side._exchanges and not self.side._loading, "requests are left"
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == BLOCKS - 1, f"{BLOCKS - 1 - free} blocks are left"

    # ---- the clients ----

    def clients(self, busy: float) -> None:
        if self.chance.random() < 0.3 + 0.5 * busy:
            self.come()
        living = sorted(name for name, each in self.scheduler.requests.items() if not each.is_finished())
        if living and self.chance.random() < 0.12:
            self.scheduler.finish_requests(self.chance.choice(living), RequestStatus.FINISHED_ABORTED)
            self.happened["aborted"] += 1
        if self.chance.random() < 0.03:
            with suppress(RuntimeError):  # blocks that wait for readers cannot be taken back
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
                self.happened["reset"] += 1

    def come(self) -> None:
        """A request, or several answers to one prompt."""
        chance = self.chance
        self.requests += 1
        shared = [5 + self.requests % 3] * chance.choice((0, 8, 16, 24))
        prompt = shared + [chance.randrange(STOP_TOKEN, 9) for _ in range(chance.randrange(1, 30))]
        kind = chance.choice(("plain", "keep", "keep", "keep", "read", "read", "read", "both"))
        params: dict[str, Any] = {"do_remote_decode": True} if kind == "keep" else {}
        if kind in ("read", "both"):
            most = len(prompt) - (1 if self.has_state else 0)
            reach = most if kind == "read" and chance.random() < 0.7 else chance.randrange(len(prompt) + 1)
            params = Handoff(
                do_remote_prefill=kind == "read", do_remote_decode=kind == "both", remote_engine_id="p",
                remote_request_id=f"lease-{max(1, self.requests - (chance.random() < 0.2))}", remote_host="127.0.0.1",
                remote_port=9, remote_num_tokens=reach, remote_room=-(-reach // BLOCK) * BLOCK or None,
            ).model_dump()  # fmt: skip
            if chance.random() < 0.1:
                params["remote_port"] = "none"
        most = 1 if kind == "keep" and chance.random() < 0.6 else chance.randrange(1, 12)
        name = f"r{self.requests}"
        for each in [name] if chance.random() < 0.85 else [f"{i}_{name}" for i in range(3)]:
            more = SamplingParams(
                max_tokens=most, stop_token_ids=[STOP_TOKEN], extra_args={"kv_transfer_params": dict(params)}
            )
            more.update_from_generation_config({}, 2)
            self.prompts[each] = self.tokens[each] = prompt
            hasher = get_request_block_hasher(self.hashed, sha256)
            self.scheduler.add_request(Request(each, list(prompt), more, None, block_hasher=hasher))
        self.happened[kind] += 1

    # ---- the engine ----

    def turn(self) -> None:
        output, scheduled = self.scheduler.schedule(), {}
        for name, count in output.num_scheduled_tokens.items():
            request, blocks = self.scheduler.requests[name], self.scheduler.kv_cache_manager.get_block_ids(name)
            scheduled[name] = request.num_computed_tokens - count, count, blocks, list(request._all_token_ids)
        self.happened["preempted"] += len(output.preempted_req_ids or ())
        self.sent.append(Sent(output.kv_connector_metadata, output, scheduled))
        if len(self.sent) == self.in_flight:
            self.execute(self.sent.popleft())
        while self.sent and not self.scheduler.has_requests():
            self.execute(self.sent.popleft())

    def execute(self, sent: Sent) -> None:
        self.begin(sent.step)
        sampled = {name: self.compute(name, *what) for name, what in sent.scheduled.items()}
        for publish in sent.step.computed:
            self.publish(publish)
        self.check()
        arrived, failed = self.go_on()
        names = list(sampled)
        kv = KVConnectorOutput(
            finished_sending=self.read() or None, finished_recving=arrived | failed or None, failed_recving=failed
        )
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()), kv_connector_output=kv,
        )  # fmt: skip
        self.scheduler.update_from_output(sent.output, result)

    def begin(self, step: Step) -> None:
        for name in step.revoke:
            self.leases.pop(name, None)
        for name in step.cancel:
            if name in self.loading:  # else it has ended, and the scheduler has not heard that
                self.loading[name].cancelled = True
        for publish in step.finished:
            self.publish(publish)
        for name in step.hold:
            self.leases[name].steps_left = self.chance.randrange(1, 8)
        for name in step.unread:
            if name in self.leases:
                self.leases[name].steps_left = 1
        for load in step.load:
            assert load.request_id not in self.loading, f"{load.request_id} is read twice"
            self.loading[load.request_id] = Loading(load, self.prompts[load.request_id], self.chance.randrange(6))
        self.refused = step.refuse

    def compute(self, name: str, start: int, count: int, blocks: tuple[list[int], ...], known: list[int]) -> list[int]:
        """A token where these reach the newest one."""
        tokens = self.tokens[name]
        if start + count <= len(known) or known != tokens[: len(known)]:
            tokens = known  # begun anew
        for group, ids in enumerate(blocks):
            for position in self.needed(group, start - 1, start):
                has = self.memory.get(self.place(group, ids, position))
                assert has == written(tokens, position), f"{name} computes {start} on what it lacks: {position} {ids}"
        for position in range(start, start + count):
            for group, ids in enumerate(blocks):
                self.write(self.place(group, ids, position), written(tokens, position))
        sampled = [STOP_TOKEN + hash(tuple(tokens)) % 5] if start + count == len(tokens) else []
        self.tokens[name] = tokens + sampled
        return sampled

    def needed(self, group: int, newest: int, token: int) -> range:
        """The tokens up to the newest whose KV in this group a token needs."""
        if group and self.has_state:
            return range(max(0, newest), newest + 1)  # the state that this one has left
        return range(looks_back(self.kind, token) if group else 0, newest + 1)

    def place(self, group: int, ids: list[int], position: int) -> tuple[int, int]:
        """The block and the slot."""
        size = self.sizes[group]
        return ids[position // size], WHOLE if group and self.has_state else position % size

    def write(self, place: tuple[int, int], content: int) -> None:
        block, slot = place
        if block:  # or it is vLLM's null block
            for other in range(max(self.sizes)) if slot == WHOLE else (WHOLE,):
                self.memory.pop((block, other), None)
            self.memory[place] = content

    def publish(self, publish: Publish) -> None:
        name = publish.request_id
        request, prompt = self.scheduler.requests.get(name), self.prompts[name]
        over = request is not None and request.is_finished()
        count = min(publish.num_tokens, request.num_tokens - 1 if request is not None and over else len(prompt))
        self.leases[name] = Lease(publish, self.tokens[name], count)
        self.happened["published, last" if publish.last else "published"] += 1

    def go_on(self) -> tuple[set[str], set[str]]:
        """Reads that have arrived, and those that have failed."""
        arrived, failed = set(), set(self.refused)
        for name, each in list(self.loading.items()):
            each.steps_left -= 1
            if each.steps_left < 0 or (each.cancelled and self.chance.random() < 0.5):
                del self.loading[name]
                well = not each.cancelled and self.chance.random() < 0.8
                (arrived if well else failed).add(name)
                self.fill(each, well=well)
                self.happened["arrived" if well else "failed"] += 1
        return arrived, failed

    def fill(self, loading: Loading, *, well: bool) -> None:
        load = loading.load
        for group, table in load.tables.items():
            if group == "1" and self.has_state:
                assert load.tokens[1] == load.origin.num_tokens, "a state goes on, and is of one token alone"
                content = written(loading.prompt, load.tokens[1] - 1) if well else -1
                self.write((int(table.block_ids[0]), WHOLE), content)
                continue
            ids = table.block_ids.tolist()
            for at in range(len(ids) * self.sizes[int(group)]):
                position, place = table.first_token + at, self.place(int(group), ids, at)
                if load.tokens[0] <= position < load.tokens[1]:
                    right = well and position < load.origin.num_tokens
                    self.write(place, written(loading.prompt, position) if right else -1)

    def read(self) -> set[str]:
        """Leases that have been read, or have expired."""
        over = set()
        for name, lease in list(self.leases.items()):
            if lease.steps_left is not None:
                lease.steps_left -= 1
                if lease.steps_left < 0:
                    over.add(name)
                    del self.leases[name]
        return over

    def check(self) -> None:
        """Leases have what they say, and what is computed from it; reads have blocks of their own."""
        for name, lease in self.leases.items():
            for group, table in lease.publish.tables.items():
                first, ids = table.first_token, table.block_ids.tolist()
                last = lease.published - 1
                if group == "1" and self.has_state:
                    has = self.memory.get((ids[0], WHOLE))
                    assert has == written(lease.tokens, last), f"{name} has published a state that is not of {last}"
                    continue
                needed = self.needed(int(group), last, last)
                assert first <= needed.start, f"{name} has published {last + 1} tokens, of group {group} from {first}"
                for position in needed:
                    has = self.memory.get(self.place(int(group), ids, position - first))
                    assert has == written(lease.tokens, position), f"{name} has published what it lacks: {position}"
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for name, loading in self.loading.items():
            for table in loading.load.tables.values():
                for block in table.block_ids.tolist():
                    assert block and blocks[block].ref_cnt == 1, f"{name} reads into block {block}, which is another's"


def main(first: int, count: int) -> None:
    register()
    init_none_hash(sha256)
    wrong, happened = dict[str, str](), Counter[str]()
    with tempfile.TemporaryDirectory() as model:
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=2 * LONGEST, architectures=["LlamaForCausalLM"],
        ).save_pretrained(model)  # fmt: skip
        for seed in range(first, first + count):
            world = World(seed, model)
            try:
                world.play()
            except AssertionError as error:
                wrong[str(seed)] = f"{world.kind or 'full'}, {world.in_flight} in flight: {error}"
            happened += world.happened
    print(json.dumps({"wrong": wrong, "happened": happened}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
