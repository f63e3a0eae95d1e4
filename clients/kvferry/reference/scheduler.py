"""Requests, and continuous batching: which tokens of which requests run in the next step. No I/O.

A request reserves blocks for its prompt and all of max_tokens when it is admitted, so that it never has to be
preempted; first come, first served. Decoding requests go first in a step, prefills share what is left of it.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvferry.errors import KvferryError
from kvferry.handoff import Handoff, Origin
from kvferry.reference.config import EngineConfig
from kvferry.reference.workers import Step

FinishReason = Literal["stop", "length"]


class RequestState(enum.Enum):
    """WAITING -> [LOADING ->] RUNNING -> [HELD ->] DONE; from any of them straight to DONE by abort or error.

    WAITING for blocks. LOADING: blocks reserved, KV on its way from another engine. RUNNING: prefill or decode.
    HELD: generation is over, another engine may read the blocks.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request; with `finish_reason`, its last output."""

    request: Request
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    handoff: Handoff | None = None
    """How another engine finds the KV, when the request asked for that."""


@dataclass(slots=True, eq=False)
class Request:
    """`origin`: where the KV of a first part of the prompt is to be read from. `hold`: publish the KV afterwards."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stops: Callable[[list[int]], bool] | None = None
    """Whether the generated tokens contain a stop string."""
    origin: Origin | None = None
    hold: bool = False
    second_turn: bool = False
    """The KV is kept for the next turn of a conversation, not for an engine that takes over this one."""

    state: RequestState = RequestState.WAITING
    generated: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    cached: int = 0
    """Tokens of the prompt that the prefix cache held on admission."""
    received: int = 0
    """Tokens of the prompt that came from another engine."""
    window_first: int = 0
    """Sliding layers hold nothing of use before this token (a multiple of the block size)."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cancelled: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is more to publish, or nothing more will come; the publisher clears it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no step touches the request any more."""
    finish_reason: FinishReason | None = None
    outputs: asyncio.Queue[Output | KvferryError] = field(default_factory=asyncio.Queue)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def accept(self, token: int) -> None:
        """A token was generated, here or by the engine that prefilled; sets `finish_reason` after the last."""
        assert self.finish_reason is None
        self.generated.append(token)
        ends = token in self.stop_token_ids and len(self.generated) >= self.min_tokens
        if ends or (self.stops is not None and self.stops(self.generated)):
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"

    def leave(self) -> None:
        """No step touches the request any more."""
        self.left.set()
        self.moved.set()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`count` tokens of the request from its `computed` on; `samples` when they reach its last token."""

    request: Request
    count: int
    samples: bool


def prefix_hashes(tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """A digest per full block of tokens; each stands for everything up to and including its block."""
    digest = b""
    ids = np.asarray(tokens, dtype=np.int64)
    for stop in range(block_size, len(ids) + 1, block_size):
        digest = hashlib.blake2b(digest + ids[stop - block_size : stop].tobytes(), digest_size=16).digest()
        yield digest


class BlockPool:
    """Reference-counted blocks. A block that holds a known prefix can still be found after its last holder has released
    it, until it is needed for something else (least recently used first)."""

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        self._prefix_cache = prefix_cache
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix; they are not held yet."""
        blocks = []
        for digest in hashes:
            if (block := self._block_of.get(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def take(self, found: Sequence[int], fresh: int) -> list[int] | None:
        """Hold the blocks `found` and `fresh` more; None, and nothing changed, when there are not enough."""
        idle = sum(1 for block in found if block in self._free)
        if len(self._free) - idle < fresh:
            return None
        for block in found:
            self._free.pop(block, None)
            self._holders[block] += 1
        blocks = [*found]
        for _ in range(fresh):
            block, _ = self._free.popitem(last=False)
            assert self._holders[block] == 0
            if (digest := self._hash_of.pop(block, None)) is not None:
                del self._block_of[digest]
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go; the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, digest: bytes) -> None:
        """The held block is full and holds the prefix `digest`. The first block to hold it is the one found."""
        assert self._holders[block] > 0
        if self._prefix_cache and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest


class Scheduler:
    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_step: Sequence[Scheduled] = ()
        self._num_loading = 0
        self.pool = BlockPool(engine.num_blocks, prefix_cache=engine.prefix_cache)

    def occupancy(self) -> dict[str, int]:
        """How many requests are in each state before HELD, and how many blocks are free."""
        return {
            "waiting": len(self._waiting), "loading": self._num_loading, "running": len(self._running),
            "free_blocks": self.pool.num_free,
        }  # fmt: skip

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._engine.block_size)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        self._waiting.append(request)

    def admit(self) -> list[Request]:
        """Give blocks to waiting requests. Returns those with an origin: they are LOADING until `loaded` is called.

        The prefix cache never covers a whole prompt: its last block is computed, or received, so that there is a
        next token.
        """
        loading = []
        while self._waiting and len(self._running) + self._num_loading < self._engine.max_requests:
            request = self._waiting[0]
            request.hashes = list(prefix_hashes(request.prompt, self._engine.block_size))
            found = self.pool.find(request.hashes[: (len(request.prompt) - 1) // self._engine.block_size])
            needed = self.blocks_for(len(request.prompt) + request.max_tokens - 1)
            blocks = self.pool.take(found, needed - len(found))
            if blocks is None:
                break
            self._waiting.popleft()
            request.blocks = blocks
            request.cached = request.computed = len(found) * self._engine.block_size
            if request.origin is not None:
                request.state = RequestState.LOADING
                self._num_loading += 1
                loading.append(request)
            else:
                self._run(request)
        return loading

    def loaded(self, request: Request) -> None:
        """The load has ended, well or not; `computed` counts what has arrived."""
        assert request.state is RequestState.LOADING
        self._num_loading -= 1
        self._run(request)

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        if request.cancelled or request.finish_reason is not None:
            request.leave()
        else:
            self._running.append(request)

    def schedule(self) -> Sequence[Scheduled]:
        """The next step; empty when nothing can run. Finish it with `complete` before asking again."""
        assert not self._in_step
        budget, step = self._engine.max_tokens_per_step, []
        for request in sorted(self._running, key=lambda request: request.num_tokens - request.computed > 1):
            if budget == 0:
                break
            count = min(budget, request.num_tokens - request.computed)
            budget -= count
            step.append(Scheduled(request, count, request.computed + count == request.num_tokens))
        self._in_step = step
        return step

    def complete(self, sampled: Sequence[int]) -> Sequence[Scheduled]:
        """The step has run on every rank. Returns it; what is finished or cancelled has left the running requests."""
        step, self._in_step = self._in_step, ()
        tokens = iter(sampled)
        for entry in step:
            request = entry.request
            request.computed += entry.count
            token = int(next(tokens)) if entry.samples else None
            if not request.cancelled:
                self.remember(request)
                if token is not None:
                    request.accept(token)
            if request.cancelled or request.finish_reason is not None:
                self._running.remove(request)
                request.leave()
        return step

    def remember(self, request: Request) -> None:
        """Let later requests find the full blocks that hold this one's KV, where every layer of them does."""
        if request.window_first:
            return
        size = self._engine.block_size
        full = request.computed // size
        if full > len(request.hashes):
            request.hashes = list(prefix_hashes(request.tokens[: full * size], size))
        for block, digest in zip(request.blocks[:full], request.hashes[:full], strict=True):
            self.pool.remember(block, digest)

    def cancel(self, request: Request) -> None:
        """Take the request out; `request.left` is set once no step and no admission can touch it any more.

        A loading request leaves when its load has ended, a running one after the step under way.
        """
        request.cancelled = True
        request.moved.set()
        if request in self._waiting:
            self._waiting.remove(request)
            request.leave()
        elif request in self._running and not any(entry.request is request for entry in self._in_step):
            self._running.remove(request)
            request.leave()

    def hold(self, request: Request) -> None:
        """Generation is over; keep what has KV for another engine, let go of the rest."""
        assert request.state is RequestState.RUNNING
        assert request.left.is_set()
        request.state = RequestState.HELD
        kept = self.blocks_for(request.computed)
        self.pool.release(request.blocks[kept:])
        del request.blocks[kept:]

    def release(self, request: Request) -> None:
        """The request's blocks are read and written no more."""
        assert request.left.is_set()
        request.state = RequestState.DONE
        blocks, request.blocks = request.blocks, []
        self.pool.release(blocks)


def step_input(scheduled: Sequence[Scheduled]) -> Step:
    """The step as the workers get it."""
    starts = [entry.request.computed for entry in scheduled]
    return Step(
        tokens=[
            token
            for start, entry in zip(starts, scheduled, strict=True)
            for token in entry.request.tokens[start : start + entry.count]
        ],
        starts=starts,
        counts=[entry.count for entry in scheduled],
        blocks=[entry.request.blocks for entry in scheduled],
        sample=[entry.samples for entry in scheduled],
    )
