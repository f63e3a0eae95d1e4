"""The driver's side of the worker processes, and what the two send each other: a JSON object a line, over stdin and
stdout."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Sequence
from contextlib import suppress

from pydantic import BaseModel

from kvferry.errors import Internal, KvferryError
from kvferry.manifest import Manifest
from kvferry.reference.config import EngineConfig, ModelSource

_STOP_S = 5.0
_EXIT_S = 1.0


class Start(BaseModel):
    """The first message. rendezvous: a file that the ranks of one start share, to find each other.

    region: file and offset of the daemon-owned memory to map; None for private memory.
    """

    source: ModelSource
    engine: EngineConfig
    rank: int
    epoch: str
    rendezvous: str
    region: tuple[str, int] | None = None


class Step(BaseModel):
    """One step of all ranks. Per sequence: its first position, how many tokens, its blocks, whether to sample."""

    tokens: list[int]
    starts: list[int]
    counts: list[int]
    blocks: list[list[int]]
    sample: list[bool]


class Reply(BaseModel):
    """The start, or a step, is done. manifest: of the rank's cache, after the start.

    tokens: sampled, in the order of the sequences that sample; rank 0's only. failed: why the worker ends, for people.
    """

    manifest: str = ""
    tokens: list[int] = []
    failed: str = ""


class _Worker:
    """One rank's process."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank = rank
        self.process = process

    async def ask(self, message: Start | Step, timeout_s: float) -> Reply:
        """Raises KvferryError (`worker_failed`)."""
        requests, replies = self.process.stdin, self.process.stdout
        assert requests is not None and replies is not None
        try:
            async with asyncio.timeout(timeout_s):
                requests.write(message.model_dump_json().encode() + b"\n")
                await requests.drain()
                line = await replies.readline()
        except TimeoutError:
            raise self._failed(f"no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise self._failed(f"the pipe broke: {error}") from None
        reply = Reply.model_validate_json(line) if line else Reply(failed="it closed its pipe")
        if reply.failed:
            raise self._failed(reply.failed)
        return reply

    def _failed(self, why: str) -> KvferryError:
        return Internal(
            "worker_failed", f"the worker of rank {self.rank}, process {self.process.pid}, failed: {why}",
            field="rank", value=self.rank, remedy="its last words are on stderr; start the engine again",
        )  # fmt: skip

    async def ended(self) -> KvferryError:
        """Returns when the process has ended."""
        status = await self.process.wait()
        return self._failed(f"killed by signal {-status}" if status < 0 else f"exit status {status}")

    async def stop(self, *, kill: bool) -> None:
        """Returns when the process has ended: at its next read, or killed if that takes too long."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 0 if kill else _STOP_S)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Workers:
    """All ranks. Make with `spawn`, then `start`, one `step` at a time, end with `stop`."""

    def __init__(self, engine: EngineConfig, workers: Sequence[_Worker]) -> None:
        self._engine = engine
        self._workers = workers

    @classmethod
    async def spawn(cls, engine: EngineConfig) -> Workers:
        command = (sys.executable, "-m", "kvferry.reference.worker")
        env = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"OMP_NUM_THREADS": "1"}
        return cls(
            engine,
            [
                _Worker(rank, await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=env))
                for rank in range(engine.tp)
            ],
        )

    async def start(self, source: ModelSource, epoch: str, regions: Sequence[tuple[str, int]]) -> list[Manifest]:
        """`regions`: file and offset of each rank's daemon-owned memory; empty for private memory.

        Returns what each rank has in its region.
        """
        with tempfile.TemporaryDirectory(prefix="kvferry-ranks-") as folder:
            starts = [
                Start(
                    source=source, engine=self._engine, rank=rank, epoch=epoch, rendezvous=f"{folder}/rendezvous",
                    region=region,
                )
                for rank, region in enumerate(regions or [None] * len(self._workers))
            ]  # fmt: skip
            return [Manifest.from_json(each.manifest) for each in await self._ask(starts, self._engine.start_timeout_s)]

    async def step(self, step: Step) -> list[int]:
        """Run one step on all ranks; the sampled tokens. When it returns, every rank has written its KV."""
        return (await self._ask([step] * len(self._workers), self._engine.step_timeout_s))[0].tokens

    async def _ask(self, messages: Iterable[Start | Step], timeout_s: float) -> list[Reply]:
        """Each rank's reply. Raises KvferryError for the rank that died, else for the first that failed."""
        pairs = zip(self._workers, messages, strict=True)
        try:
            return await asyncio.gather(*(worker.ask(message, timeout_s) for worker, message in pairs))
        except KvferryError as error:
            # The rank that died is the reason; the others only noticed that an all-reduce broke.
            try:
                raise await asyncio.wait_for(self.died(), _EXIT_S)
            except TimeoutError:
                raise error from None

    async def died(self) -> KvferryError:
        """Returns when a worker's process has ended, at work or idle."""
        return await next(asyncio.as_completed([worker.ended() for worker in self._workers]))

    async def stop(self, *, healthy: bool = True) -> None:
        """Ends within seconds. After a failure the others may sit in an all-reduce: they are not waited for."""
        await asyncio.gather(*(worker.stop(kill=not healthy) for worker in self._workers))
