"""The driver's side of the worker processes, and what the two send each other: a JSON object a line, over stdin and
stdout."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from pydantic import BaseModel

from kvferry.errors import Internal, KvferryError
from kvferry.manifest import Manifest
from kvferry.reference.config import EngineConfig, ModelSource

_STOP_S = 5.0
_EXIT_S = 1.0
_REPLY = 64 << 20
"""Bytes of a reply, at most: the first has the rank's manifest, some 750 bytes for each layer."""


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
    """A step of all ranks. Per sequence: its first position, how many tokens, its blocks, whether to sample."""

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


class Workers:
    """All ranks. Make with `spawn`, then `start`, one `step` at a time, end with `stop`."""

    def __init__(self, engine: EngineConfig, processes: Sequence[Process]) -> None:
        self._engine = engine
        self._processes = processes

    @classmethod
    async def spawn(cls, engine: EngineConfig) -> Workers:
        command = (sys.executable, "-m", "kvferry.reference.worker")
        env = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"OMP_NUM_THREADS": "1"}
        spawn = asyncio.create_subprocess_exec
        processes = [await spawn(*command, stdin=PIPE, stdout=PIPE, env=env, limit=_REPLY) for _ in range(engine.tp)]
        return cls(engine, processes)

    async def start(self, source: ModelSource, epoch: str, regions: Sequence[tuple[str, int]]) -> list[Manifest]:
        """`regions`: file and offset of each rank's daemon-owned memory; empty for private memory.

        Returns what each rank has in its region. Raises KvferryError (`worker_failed`).
        """
        with tempfile.TemporaryDirectory(prefix="kvferry-ranks-") as folder:
            at = f"{folder}/rendezvous"
            starts = [
                Start(source=source, engine=self._engine, rank=rank, epoch=epoch, rendezvous=at, region=region)
                for rank, region in enumerate(regions or [None] * self._engine.tp)
            ]
            return [Manifest.from_json(each.manifest) for each in await self._ask(starts, self._engine.start_timeout_s)]

    async def step(self, step: Step) -> list[int]:
        """Run one step on all ranks; the sampled tokens. When it returns, every rank has written its KV.

        Raises KvferryError (`worker_failed`).
        """
        return (await self._ask([step] * self._engine.tp, self._engine.step_timeout_s))[0].tokens

    async def _ask(self, messages: Sequence[Start | Step], timeout_s: float) -> list[Reply]:
        """Each rank's reply. Raises KvferryError for the rank that died, else for the first that failed."""
        try:
            return await asyncio.gather(*(self._ask_rank(rank, each, timeout_s) for rank, each in enumerate(messages)))
        except KvferryError as error:
            # The rank that died is the reason; the others only noticed that an all-reduce broke.
            try:
                raise await asyncio.wait_for(self.died(), _EXIT_S)
            except TimeoutError:
                raise error from None

    async def _ask_rank(self, rank: int, message: Start | Step, timeout_s: float) -> Reply:
        requests, replies = self._processes[rank].stdin, self._processes[rank].stdout
        assert requests is not None and replies is not None
        try:
            async with asyncio.timeout(timeout_s):
                requests.write(message.model_dump_json().encode() + b"\n")
                await requests.drain()
                line = await replies.readline()
        except TimeoutError:
            raise self._failed(rank, f"no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise self._failed(rank, f"the pipe broke: {error}") from None
        reply = Reply.model_validate_json(line) if line else Reply(failed="it closed its pipe")
        if reply.failed:
            raise self._failed(rank, reply.failed)
        return reply

    def _failed(self, rank: int, why: str) -> KvferryError:
        return Internal(
            "worker_failed", f"the worker of rank {rank}, process {self._processes[rank].pid}, failed: {why}",
            field="rank", value=rank, remedy="its last words are on stderr; start the engine again",
        )  # fmt: skip

    async def died(self) -> KvferryError:
        """Returns when a worker's process has ended, at work or idle."""

        async def ended(rank: int, process: Process) -> KvferryError:
            status = await process.wait()
            return self._failed(rank, f"killed by signal {-status}" if status < 0 else f"exit status {status}")

        return await next(asyncio.as_completed([ended(*each) for each in enumerate(self._processes)]))

    async def stop(self, *, healthy: bool = True) -> None:
        """A worker ends at its next read. After a failure they may sit in an all-reduce: they are not waited for."""

        async def stop(process: Process) -> None:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_S if healthy else 0)
            if process.returncode is None:
                process.kill()
                await process.wait()

        await asyncio.gather(*(stop(process) for process in self._processes))
