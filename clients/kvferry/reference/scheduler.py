"""Continuous batching: which tokens of which requests run in the next step. No I/O.

A request reserves blocks for its prompt and all of max_tokens when it is admitted, so that it never has to be
preempted; first come, first served. Decoding requests go first in a step, prefills share what is left of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.reference.blocks import BlockPool, prefix_hashes
from kvferry.reference.config import EngineConfig
from kvferry.reference.request import Request, RequestState
from kvferry.reference.wire import Step


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many requests are in each state before HELD, and how many blocks are free."""

    waiting: int
    loading: int
    running: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`count` tokens of the request from its `computed` on; `samples` when they reach its last token."""

    request: Request
    count: int
    samples: bool


class Scheduler:
    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_step: Sequence[Scheduled] = ()
        self._num_loading = 0
        self.pool = BlockPool(engine.num_blocks, prefix_cache=engine.prefix_cache)

    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._waiting), self._num_loading, len(self._running), self.pool.num_free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._engine.block_size)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        self._waiting.append(request)

    def admit(self) -> None:
        """Give blocks to waiting requests. One with an origin is then LOADING, until `loaded` is called.

        The prefix cache never covers a whole prompt: its last block is computed, or received, so that there is a
        next token.
        """
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
            else:
                self._run(request)
            request.admitted.set()

    def loaded(self, request: Request) -> None:
        """The load has ended, well or not; `computed` counts what has arrived."""
        assert request.state is RequestState.LOADING
        self._num_loading -= 1
        self._run(request)

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        if request.cancelled or request.finish_reason is not None:
            request.left.set()
        else:
            self._running.append(request)

    def schedule(self) -> Sequence[Scheduled]:
        """The next step; empty when nothing can run. Finish it with `complete` before asking again."""
        assert not self._in_step
        budget, step = self._engine.max_step_tokens, []
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
                request.left.set()
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
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            request.admitted.set()
            request.left.set()
        elif request in self._running and not any(entry.request is request for entry in self._in_step):
            self._running.remove(request)
            request.left.set()

    def hold(self, request: Request) -> None:
        """Generation is over; keep what has KV for another engine, let go of the rest."""
        assert request.state is RequestState.RUNNING
        assert request.left.is_set()
        request.state = RequestState.HELD
        kept = self.blocks_for(request.computed)
        self.pool.release(request.blocks[kept:])
        del request.blocks[kept:]

    def release(self, request: Request) -> None:
        """Nobody reads or writes the request's blocks any more."""
        assert request.left.is_set()
        request.state = RequestState.DONE
        blocks, request.blocks = request.blocks, []
        self.pool.release(blocks)


def step_input(scheduled: Sequence[Scheduled]) -> Step:
    """What the workers get."""
    step = Step([], [], [], [], [], [])
    for entry in scheduled:
        request, start = entry.request, entry.request.computed
        step.tokens.extend(request.tokens[start : start + entry.count])
        step.starts.append(start)
        step.counts.append(entry.count)
        step.blocks.extend(request.blocks)
        step.num_blocks.append(len(request.blocks))
        step.sample.append(entry.samples)
    return step
