"""The driver's side of the worker processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from kvferry.errors import Internal, KvferryError
from kvferry.reference.config import EngineConfig, ModelSource
from kvferry.reference.wire import Done, Failed, Message, Start, Step, packed, unpacked

_STOP_S = 5.0
_SEND_S = 10
_EXIT_S = 1.0


class _Worker:
    """One rank's process and the driver's end of its pipe."""

    def __init__(self, rank: int, process: Process, pipe: Connection) -> None:
        self.rank = rank
        self.process = process
        self._pipe = pipe

    @classmethod
    async def spawn(cls, rank: int) -> _Worker:
        ours, theirs = socket.socketpair()
        # A worker reads whenever it owes no answer, so a send that blocks this long has met a stopped process.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        with theirs:
            # From the loop's own thread: the kernel ends a worker with the thread that forked it (PR_SET_PDEATHSIG).
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvferry.reference.worker", str(theirs.fileno()), str(os.getpid())),
                pass_fds=[theirs.fileno()],
                env={"GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return cls(rank, process, Connection(ours.detach()))

    def send(self, message: Message) -> None:
        try:
            self._pipe.send_bytes(packed(message))
        except OSError as error:
            raise self.failed(f"the pipe broke: {error}") from None

    async def done(self, timeout_s: float) -> Done:
        """The next message. Raises KvferryError (`worker_failed`)."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._pipe.fileno(), readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                await readable.wait()
        except TimeoutError:
            raise self.failed(f"no answer within {timeout_s:g} s") from None
        finally:
            loop.remove_reader(self._pipe.fileno())
        try:
            message = unpacked(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self.failed("it closed its pipe") from None
        if not isinstance(message, Done):
            raise self.failed(message.why if isinstance(message, Failed) else f"it sent {message.op}")
        return message

    def failed(self, why: str) -> KvferryError:
        return Internal(
            "worker_failed", f"the worker of rank {self.rank}, process {self.process.pid}, failed: {why}",
            field="rank", value=self.rank, remedy="its last words are on stderr; start the engine again",
        )  # fmt: skip

    async def ended(self) -> KvferryError:
        """Returns when the process has ended."""
        status = await self.process.wait()
        return self.failed(f"killed by signal {-status}" if status < 0 else f"exit status {status}")

    def hang_up(self) -> None:
        """A worker ends at its next read."""
        self._pipe.close()

    async def stop(self) -> None:
        """Returns when the process has ended, killed if it takes too long."""
        try:
            async with asyncio.timeout(_STOP_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


class Workers:
    """All ranks. Make with `spawn`, then `start`, one `step` at a time, end with `stop`."""

    def __init__(self, engine: EngineConfig, workers: Sequence[_Worker]) -> None:
        self._engine = engine
        self._workers = workers
        self._folder = tempfile.mkdtemp(prefix="kvferry-ranks-")

    @classmethod
    async def spawn(cls, engine: EngineConfig) -> Workers:
        return cls(engine, [await _Worker.spawn(rank) for rank in range(engine.tp)])

    async def start(self, source: ModelSource, regions: Sequence[tuple[str, int]]) -> None:
        """`regions`: file and offset of each rank's daemon-owned memory; empty for private memory."""
        rendezvous = str(Path(self._folder) / "rendezvous")
        for worker in self._workers:
            path, offset = regions[worker.rank] if regions else ("", 0)
            worker.send(Start(source, self._engine, worker.rank, rendezvous, path, offset))
        await self._all_done(self._engine.start_timeout_s)
        self._forget_folder()  # the ranks have met; a driver that is killed leaves nothing behind

    async def step(self, step: Step) -> list[int]:
        """Run one step on all ranks; the sampled tokens. When it returns, every rank has written its KV."""
        for worker in self._workers:
            worker.send(step)
        return (await self._all_done(self._engine.step_timeout_s))[0].tokens

    async def _all_done(self, timeout_s: float) -> list[Done]:
        """One message of each rank. Raises KvferryError for the rank that died, else for the first that failed."""
        waits = [asyncio.create_task(worker.done(timeout_s)) for worker in self._workers]
        try:
            return await asyncio.gather(*waits)
        except KvferryError as error:
            # The rank that died is the reason; the others only noticed that an all-reduce broke.
            try:
                raise await asyncio.wait_for(self.died(), _EXIT_S)
            except TimeoutError:
                raise error from None
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def died(self) -> KvferryError:
        """Returns when a worker's process has ended, at work or idle."""
        waits = [asyncio.create_task(worker.ended()) for worker in self._workers]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self, *, healthy: bool = True) -> None:
        """Ends within seconds. After a failure the others may sit in an all-reduce: they are not waited for."""
        for worker in self._workers:
            worker.hang_up()
            if not healthy and worker.process.returncode is None:
                worker.process.kill()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._forget_folder()

    def _forget_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
