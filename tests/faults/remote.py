"""An engine's rank in a process of its own, which a test commands, stops, and kills.

    async with remote(daemon, "decode", BIG) as engine:
        await engine.publish("r", blocks, tokens=50, seed=1)          # Kv.random(50, seed=1)
        receiving = asyncio.create_task(engine.receive("r", blocks, source=source))
        await engine.cancel("r")                                     # returns when the client's `receive` has returned
        assert await engine.differs(blocks, tokens=50, seed=1) == ""

What the engine raises is raised here, with its code. `engine.process` is the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from fleet import TIMEOUT_S
from ranks import Blocks, Kv, Rank, Shape, start_rank

from kvferry.engine import Lease
from kvferry.errors import KvferryError
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService

Answer = dict[str, Any]


@dataclass
class Remote:
    """The test's side. Commands may be under way beside each other; each returns what the engine answers."""

    engine_id: str
    epoch: str
    daemon: DaemonService
    process: asyncio.subprocess.Process
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    _gone: bool = False

    def source(self) -> SourceBody:
        return SourceBody(engine_id=self.engine_id, address=self.daemon.peer, epoch=self.epoch)

    async def write(self, blocks: Blocks, tokens: int, seed: int) -> None:
        """Put the KV into the blocks, and tell nobody."""
        await self._ask("write", blocks=asdict(blocks), tokens=tokens, seed=seed)

    async def publish(self, request_id: str, blocks: Blocks, tokens: int, seed: int, **more: Any) -> None:
        """`write` it and publish it; `more` goes to `EngineClient.publish`."""
        await self.write(blocks, tokens, seed)
        await self._ask("publish", request_id=request_id, blocks=asdict(blocks), tokens=tokens, more=more)

    async def ended(self, request_id: str) -> str:
        """How the lease of the last publish ended; waits for it."""
        return str((await self._ask("ended", request_id=request_id))["state"])

    async def receive(self, request_id: str, blocks: Blocks, source: SourceBody | None = None, **more: Any) -> int:
        """Returns how many bytes were moved. Raises KvferryError with the code of a failure or a refusal."""
        body = None if source is None else source.model_dump()
        answer = await self._ask("receive", request_id=request_id, blocks=asdict(blocks), source=body, more=more)
        return int(answer["nbytes"])

    async def cancel(self, request_id: str) -> None:
        """Cancel the receive, and wait until the client has let go of it."""
        await self._ask("cancel", request_id=request_id)

    async def quiesced(self, request_id: str) -> None:
        """Wait until the blocks of the last receive that failed are safe to reuse."""
        await self._ask("quiesced", request_id=request_id)

    async def withdraw(self, request_id: str, blocks: Blocks, tokens: int, seed: int) -> None:
        """As a preempted prefill: abort the request and, as soon as its lease has ended, write other KV there."""
        await self._ask("withdraw", request_id=request_id, blocks=asdict(blocks), tokens=tokens, seed=seed)

    async def differs(self, blocks: Blocks, tokens: int, seed: int) -> str:
        """The place where the blocks hold anything but the KV; empty if nowhere."""
        return str((await self._ask("differs", blocks=asdict(blocks), tokens=tokens, seed=seed))["where"])

    async def _ask(self, command: str, **arguments: Any) -> Answer:
        assert self.process.stdin is not None
        if self._gone:
            raise KvferryError("engine_gone", f"{self.engine_id}: its process has ended")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps([number, command, arguments]).encode() + b"\n")
        async with asyncio.timeout(3 * TIMEOUT_S):
            answered = await answer
        if "code" in answered:
            raise KvferryError(answered["code"], f"{self.engine_id}: {answered['message']}")
        return answered

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            number, answer = json.loads(line)
            self._answered(number, answer)
        self._gone = True
        for number in tuple(self._waiting):
            self._answered(number, {"code": "engine_gone", "message": "its process has ended"})

    def _answered(self, number: int, answer: Answer) -> None:
        waiting = self._waiting.pop(number)
        if not waiting.done():  # done: its waiter has left
            waiting.set_result(answer)


def started(daemon: DaemonService, engine_id: str, shape: Shape, epoch: str, rank: int = 0) -> list[str]:
    """The command of its process."""
    told = json.dumps([str(daemon.socket), engine_id, epoch, asdict(shape), rank])
    return [sys.executable, __file__, told]


@asynccontextmanager
async def remote(
    daemon: DaemonService, engine_id: str, shape: Shape, epoch: str = "1", rank: int = 0
) -> AsyncIterator[Remote]:
    """Its process ends with the block, stopped or not."""
    command = started(daemon, engine_id, shape, epoch, rank)
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
    engine = Remote(engine_id, epoch, daemon, process)
    listening = asyncio.create_task(engine._listen())
    try:
        await engine._ask("start")
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await listening


class Engine:
    """The engine's side."""

    def __init__(self, rank: Rank, shape: Shape, number: int) -> None:
        self.rank, self.shape, self.number = rank, shape, number
        self.receiving: dict[str, asyncio.Task[Any]] = {}
        self.leases: dict[str, Lease] = {}

    async def start(self) -> Answer:
        return {}

    async def write(self, blocks: Blocks, tokens: int, seed: int) -> Answer:
        self.shape.write(self.number, self.rank.memory, Kv.random(tokens, seed), blocks, (0, tokens), True)
        return {}

    async def publish(self, request_id: str, blocks: Blocks, tokens: int, more: dict[str, Any]) -> Answer:
        self.leases[request_id] = await self.rank.client.publish(request_id, blocks.tables(), tokens, **more)
        return {}

    async def ended(self, request_id: str) -> Answer:
        return {"state": await self.leases[request_id].ended()}

    async def receive(
        self, request_id: str, blocks: Blocks, source: dict[str, str] | None, more: dict[str, Any]
    ) -> Answer:
        body = None if source is None else SourceBody.model_validate(source)
        receive = self.rank.client.receive(request_id, blocks.tables(), source=body, **more)
        task = self.receiving[request_id] = asyncio.create_task(receive)
        try:
            await asyncio.wait([task])
            return {"nbytes": task.result().nbytes}
        except asyncio.CancelledError:
            return {"code": "cancelled", "message": "the receive was cancelled"}

    async def cancel(self, request_id: str) -> Answer:
        self.receiving[request_id].cancel()
        await asyncio.wait([self.receiving[request_id]])
        return {}

    async def quiesced(self, request_id: str) -> Answer:
        await self.rank.client.quiesced(request_id)
        return {}

    async def withdraw(self, request_id: str, blocks: Blocks, tokens: int, seed: int) -> Answer:
        await self.rank.client.abort(request_id)
        await self.leases[request_id].ended()
        return await self.write(blocks, tokens, seed)

    async def differs(self, blocks: Blocks, tokens: int, seed: int) -> Answer:
        wrong = self.shape.wrong(self.number, self.rank.memory, Kv.random(tokens, seed), blocks)
        return {"where": f"{wrong} elements differ" if wrong else ""}


async def _answered(engine: Engine, number: int, command: str, arguments: dict[str, Any]) -> None:
    if "blocks" in arguments:
        arguments["blocks"] = Blocks(**arguments["blocks"])
    try:
        answer: Answer = await getattr(engine, command)(**arguments)
    except KvferryError as error:
        answer = {"code": error.code, "message": str(error)}
    print(json.dumps([number, answer]), flush=True)


async def _serve(socket: str, engine_id: str, epoch: str, shape: Shape, rank: int) -> None:
    engine = Engine(await start_rank(engine_id, Path(socket), shape, rank, epoch), shape, rank)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as commands:
        async for line in lines:
            commands.create_task(_answered(engine, *json.loads(line)))


if __name__ == "__main__":
    socket, engine_id, epoch, shape, rank = json.loads(sys.argv[1])
    asyncio.run(_serve(socket, engine_id, epoch, Shape(**shape), rank))
