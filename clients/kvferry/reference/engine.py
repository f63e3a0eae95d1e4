"""The driver: requests in, steps out to the workers, KV to and from other engines."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from kvferry.digest import prompt_digest
from kvferry.engine import Lease
from kvferry.errors import Conflict, Deadline, Full, KvferryError, Malformed, Unavailable
from kvferry.handoff import answer
from kvferry.reference.cache import RankShard, axis_order
from kvferry.reference.config import EngineConfig, ModelSource
from kvferry.reference.daemons import Daemons, LoadFailed
from kvferry.reference.scheduler import Output, Request, RequestState, Scheduled, Scheduler, step_input
from kvferry.reference.workers import Workers
from kvferry.tables import BlockTable

_LAST_STEP_S = 5.0


class Engine:
    """Make it inside a running event loop, `start` it, `generate` any number of requests at once, `stop` it.

    `failed` is done, with the reason, when a worker or a daemon is gone: nothing can be served any more.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        axis_order(config.layout)
        RankShard.of(source.config, 0, config.tp)
        self.source = source
        self.config = config
        self.epoch = uuid.uuid4().hex
        self.failed: asyncio.Future[KvferryError] = asyncio.get_running_loop().create_future()
        self.scheduler = Scheduler(config)
        self._workers: Workers | None = None
        self._daemons: Daemons | None = None
        self._wake = asyncio.Event()
        self._requests: set[Request] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises KvferryError when a daemon or a worker does not come up; then nothing is left running."""
        try:
            self._workers = await Workers.spawn(self.config)
            regions: list[tuple[str, int]] = []
            if self.config.daemons:
                self._daemons = await Daemons.connect(self.config, self.epoch)
                self._spawn(self._watch(self._daemons.gone()))
                regions = await self._daemons.allocate(self.source.config)
            manifests = await self._workers.start(self.source, self.epoch, regions)
            if self._daemons is not None:
                await self._daemons.register(manifests)
        except BaseException:
            await self.stop()
            raise
        self._spawn(self._watch(self._workers.died()))
        self._loop = self._spawn(self._run(self._workers))

    async def stop(self) -> None:
        """End every request, session and process. Takes seconds at most."""
        healthy = not self.failed.done()
        self._fail(Unavailable("stopping", "the engine is shutting down"))
        if self._loop is not None:
            await asyncio.wait({self._loop}, timeout=_LAST_STEP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._workers is not None:
            await self._workers.stop(healthy=healthy)
        if self._daemons is not None:
            await self._daemons.close()

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        """Outputs of all requests as they come, until each has had one with a finish_reason.

        Leaving early aborts what is unfinished. Raises KvferryError.
        """
        outputs: asyncio.Queue[Output | KvferryError] = asyncio.Queue()
        unfinished: set[Request] = set()
        limit_s = self.config.request_timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        try:
            for request in requests:
                request.outputs = outputs
                self._submit(request)
                unfinished.add(request)
            while unfinished:
                async with asyncio.timeout_at(deadline):  # wait_for would swallow a cancellation beside an output
                    output = await outputs.get()
                if isinstance(output, KvferryError):
                    raise output
                if output.finish_reason is not None:
                    unfinished.remove(output.request)
                yield output
        except TimeoutError:
            request_id = requests[0].request_id
            raise Deadline("deadline", f"request {request_id} took more than {limit_s:g} s") from None
        finally:
            for request in unfinished:
                self._cancel(request)

    def _submit(self, request: Request) -> None:
        if self.failed.done():
            raise self.failed.result()
        if len(self._requests) >= self.config.max_waiting:
            raise Full("full", "too many requests are waiting", remedy="try again later")
        length = len(request.prompt) + request.max_tokens
        limit = min(self.source.config.max_positions, self.config.num_blocks * self.config.block_size)
        if length > limit:
            raise Malformed(
                "prompt_too_long", f"prompt and max_tokens are {length} tokens, the engine holds {limit}",
                field="prompt", value=length, remedy="shorten the prompt, or give the engine more --num-blocks",
            )  # fmt: skip
        if self._daemons is None and (request.hold or request.origin):
            raise Unavailable(
                "no_daemon", "this engine runs without a daemon and exchanges no KV", field="kv_transfer_params",
                remedy="start it with --daemon SOCKET for each rank",
            )  # fmt: skip
        for other in self._requests:
            if (request.hold and other.hold and request.request_id == other.request_id) or (
                request.origin and other.origin and request.origin.request_id == other.origin.request_id
            ):
                raise Conflict(
                    "request_exists", f"the KV of request {other.request_id} is being exchanged already",
                    field="X-Request-Id", value=other.request_id, remedy="use a new id for a new request",
                )  # fmt: skip
        self._requests.add(request)
        self._spawn(self._live(request))

    def _cancel(self, request: Request) -> None:
        """The client has left; `_live` frees what the request holds."""
        self.scheduler.cancel(request)
        if request.state is RequestState.LOADING and request.origin and self._daemons:
            self._spawn(self._daemons.abort(request.origin.request_id))

    async def _run(self, workers: Workers) -> None:
        """Run step after step, for as long as there is something to do."""
        try:
            while not self.failed.done():
                for request in self.scheduler.admit():
                    self._spawn(self._load(request))
                step = self.scheduler.schedule()
                if not step:
                    await self._wake.wait()
                    self._wake.clear()
                    continue
                sampled = await workers.step(step_input(step))
                for entry in self.scheduler.complete(sampled):
                    self._advanced(entry)
        except KvferryError as error:
            self._fail(error)

    def _advanced(self, entry: Scheduled) -> None:
        """A step of this request is done: its token goes to the client, its KV to readers."""
        request = entry.request
        if request.cancelled:
            return
        if entry.samples:
            self._emit(request)
        elif self.config.progressive and request.max_tokens == 1:
            # Only then is it known what the lease will hold: its digest is that of the whole.
            request.moved.set()

    @staticmethod
    def _emit(request: Request) -> None:
        """The newest token. The last output of a request that is held comes when its KV is published."""
        finish_reason = None if request.hold else request.finish_reason
        request.outputs.put_nowait(Output(request, (request.generated[-1],), finish_reason))

    async def _live(self, request: Request) -> None:
        """A request's life: admitted, loaded and run by `_run`, held for other engines; then its blocks go back."""
        try:
            self.scheduler.add(request)
            self._wake.set()
            if self._daemons and request.hold:
                await self._share(request, self._daemons)
            await request.left.wait()
            self.scheduler.release(request)
            self._wake.set()
        finally:
            self._requests.discard(request)

    async def _load(self, request: Request) -> None:
        """Read the prompt's KV from the engine that prefilled it; after this the request runs, or has left."""
        assert self._daemons is not None and request.origin is not None
        if request.cancelled:
            self.scheduler.loaded(request)
            return
        reach = request.origin.num_tokens
        start = min(request.cached, reach)
        size, window = self.config.block_size, self.source.config.window
        window_first = max(start, (reach - window) // size * size) if window else 0
        tables = self._tables(request, start, reach, window_first)
        try:
            received = await self._daemons.receive(request.origin, tables, (start, reach))
        except LoadFailed as error:
            if self.config.on_load_failure == "fail":
                request.cancelled = True
                request.outputs.put_nowait(error)
            await error.quiesced()
        else:
            request.received = reach - start
            request.window_first = window_first if window_first > start else 0
            whole = reach == len(request.prompt)
            token = _first_token(received.metadata, self.source.config.vocab_size) if whole else None
            # Without a first token the last token of the prompt runs again: its KV is there, the next token is not.
            request.computed = max(request.cached, reach - 1 if whole and token is None else reach)
            self.scheduler.remember(request)
            if token is not None and not request.cancelled:
                request.accept(token)
                self._emit(request)
        self.scheduler.loaded(request)
        self._wake.set()

    async def _share(self, request: Request, daemons: Daemons) -> None:
        """Publish while the request runs, always the newest state, and hold its blocks until the leases have ended."""
        leases: Sequence[Lease] = ()
        number, last = daemons.next_lease(), False
        try:
            while not last:
                await request.moved.wait()
                request.moved.clear()
                _check(request)
                if last := request.left.is_set():
                    self.scheduler.hold(request)
                leases = await daemons.publish(
                    request.request_id, number, self._held(request), request.computed, more=not last,
                    digest=prompt_digest(request.tokens[: request.computed] if last else request.prompt),
                    metadata=json.dumps({"first_token": request.generated[-1]}).encode() if last else b"",
                )  # fmt: skip
            _check(request)
            handoff = answer(
                engine_id=self.config.engine_id, epoch=self.epoch, address=daemons.address,
                request_id=request.request_id, lease=number, num_tokens=request.computed, tp=self.config.tp,
                block_ids=[table.block_ids.tolist() for table in self._held(request).values()],
                second_turn=request.second_turn, first_token=request.generated[-1],
            )  # fmt: skip
            request.outputs.put_nowait(Output(request, (), request.finish_reason, handoff))
        except KvferryError as error:
            request.outputs.put_nowait(error)
            self.scheduler.cancel(request)
            await daemons.abort(request.request_id)
        # Until no reader may read any more: read, expired, revoked, or the daemon is gone.
        await asyncio.gather(*(lease.ended() for lease in leases), return_exceptions=True)

    def _held(self, request: Request) -> dict[str, BlockTable]:
        """The blocks of all computed tokens."""
        return self._tables(request, 0, request.computed, request.window_first)

    def _tables(self, request: Request, start: int, stop: int, window_first: int) -> dict[str, BlockTable]:
        """Block tables for tokens [start, stop), sliding layers from `window_first` on. Both begin at a block.

        Empty tables, not absent ones, for no tokens: nothing is wanted, and the lease is closed all the same.
        """
        size = self.config.block_size
        end = -(-stop // size) if stop > start else 0
        tables = {}
        for group, window in self.source.config.groups.items():
            first = start if window is None else max(start, window_first)
            tables[group] = BlockTable.of(request.blocks[first // size : end], first)
        return tables

    async def _watch(self, loss: Coroutine[Any, Any, KvferryError]) -> None:
        self._fail(await loss)

    def _fail(self, error: KvferryError) -> None:
        """Nothing can be served any more: every request fails, and `failed` is set."""
        if not self.failed.done():
            self.failed.set_result(error)
            for request in self._requests:
                request.outputs.put_nowait(error)
            self._wake.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check(request: Request) -> None:
    if request.cancelled:
        raise Conflict("aborted", f"request {request.request_id} was aborted")


def _first_token(metadata: bytes, vocab_size: int) -> int | None:
    """The token that follows the published ones; None when another engine's metadata is not in our form."""
    try:
        token = json.loads(metadata)["first_token"]
    except (ValueError, KeyError, TypeError):
        return None
    return token if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size else None
