"""The control path: what one transfer costs the event loops of both daemons and of the reading engine's client.

Every loop counts its own turns, callbacks, tasks, futures and timers, and the messages that gRPC hands it; its
microseconds are the processor time of its thread, which other processes on the machine do not change much.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import numpy as np

from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench import host
from kvferryd.demo.fleet import DaemonService, Fleet

RUN_NBYTES, BLOCKS = 4 << 10, 8
"""1 MiB: 8 blocks of 32 runs."""
TRANSFERS, PROFILED, WARM_UP, AT_ONCE = 1024, 256, 128, 64
AFTER_S, COUNT_S = 0.5, 30.0
SOURCE, READER = "control-source", "control-reader"
COLUMNS = ("turns", "callbacks", "tasks", "futures", "timers", "received", "sent", "calls", "us")
found: Counter[str] = Counter()
"""Counts of this process's event loop so far."""


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that counts what it does."""

    def _run_once(self) -> None:
        found["turns"] += 1
        super()._run_once()  # type: ignore[misc]  # not public

    def call_soon(self, *args: Any, **named: Any) -> asyncio.Handle:  # type: ignore[override]  # passed on as they are
        found["callbacks"] += 1
        return super().call_soon(*args, **named)

    def call_at(self, *args: Any, **named: Any) -> asyncio.TimerHandle:  # type: ignore[override]  # likewise
        found["timers"] += 1
        return super().call_at(*args, **named)

    def create_task(self, *args: Any, **named: Any) -> asyncio.Task[Any]:
        found["tasks"] += 1
        return super().create_task(*args, **named)

    def create_future(self) -> asyncio.Future[Any]:
        found["futures"] += 1
        return super().create_future()


def _counted(name: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def counted(message: Any) -> Any:
        found[name] += 1
        return convert(message)

    return counted


def count_messages() -> None:
    """From now on, for every stream that is opened or served."""
    channel: Any = grpc.aio._channel.Channel  # type: ignore[attr-defined]  # what grpc.aio.Channel is the base of
    handler, opened = grpc.stream_stream_rpc_method_handler, channel.stream_stream

    def served(behavior: Any, request_deserializer: Any = None, response_serializer: Any = None) -> Any:
        return handler(behavior, _counted("received", request_deserializer), _counted("sent", response_serializer))

    def dialled(self: Any, method: str, request_serializer: Any = None, response_deserializer: Any = None, *args: Any,
                **named: Any) -> Any:  # fmt: skip
        said = _counted("sent", request_serializer), _counted("received", response_deserializer)
        return opened(self, method, *said, *args, **named)

    grpc.stream_stream_rpc_method_handler, channel.stream_stream = served, dialled


def _profile(frame: object, event: str, argument: object) -> None:
    if event in ("call", "c_call"):
        found["calls"] += 1


def _snapshot() -> Counter[str]:
    return Counter({**found, "us": time.thread_time_ns() // 1000})


def serve(counts: str, arguments: list[str]) -> int:
    """A daemon that counts: SIGUSR1 writes what it has found, SIGUSR2 begins or ends to count Python's calls."""
    from kvferryd.commands.cli import main

    count_messages()
    asyncio.set_event_loop_policy(_Policy())

    def tell(*_: object) -> None:
        partial = Path(f"{counts}.new")
        partial.write_text(json.dumps(_snapshot()))
        partial.rename(counts)

    signal.signal(signal.SIGUSR1, tell)
    signal.signal(signal.SIGUSR2, lambda *_: sys.setprofile(None if sys.getprofile() else _profile))
    return main(arguments)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Loop()


class _Fleet(Fleet):
    """Its daemons count."""

    def _start(self, name: str, command: Any) -> Any:
        counted = [sys.executable, __file__, "serve", str(self.counts(name)), *command[3:]]
        return super()._start(name, counted)

    def counts(self, name: str) -> Path:
        return self.directory / f"{name}.counts"

    async def __aenter__(self) -> _Fleet:
        return self

    async def count(self, daemon: DaemonService) -> Counter[str]:
        path = self.counts(daemon.name)
        path.unlink(missing_ok=True)
        async with asyncio.timeout(COUNT_S):
            while not path.exists():
                daemon.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(0.05)
        return Counter(json.loads(path.read_text()))


class Cost(NamedTuple):
    """A transfer's cost on one event loop. us: processor time of its thread. calls: Python's, of another series."""

    series: str
    where: str
    counts: dict[str, float]


async def source(socket: str) -> None:
    """The engine that is read: publishes the requests that each line of stdin lists, and answers with a line."""
    rank = await host.rank(_at(Path(socket)), SOURCE, RUN_NBYTES)
    rank.region.array()[:] = np.random.default_rng(1).integers(0, 255, host.POOL, dtype=np.uint8)
    print(rank.client.peer_address, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        for request_id, ids in json.loads(line):
            await rank.client.publish(request_id, {"pool": BlockTable.of(ids)}, BLOCKS * host.SLOTS)
        print("published", flush=True)


def _at(socket: Path) -> Any:
    return SimpleNamespace(socket=socket)


class _Pair:
    """A source, a reader and their daemons."""

    def __init__(self, fleet: _Fleet, engine: asyncio.subprocess.Process, rank: host.Rank, body: SourceBody) -> None:
        self.fleet, self.engine, self.rank, self.body = fleet, engine, rank, body
        blocks = np.random.default_rng(2).permutation(host.POOL // RUN_NBYTES // host.ROWS)
        self.places = [blocks[at : at + BLOCKS].tolist() for at in range(0, len(blocks) - BLOCKS, BLOCKS)]

    async def series(self, at_once: int, count: int) -> tuple[dict[str, Counter[str]], float]:
        """(what it cost in all, by loop; median milliseconds of a transfer)."""
        daemons = {each.name: each for each in self.fleet.services if isinstance(each, DaemonService)}
        before = {name: await self.fleet.count(each) for name, each in daemons.items()}
        client, times = Counter[str](), []
        for _ in range(0, count, AT_ONCE):
            requests = [(uuid.uuid4().hex, self.places[at]) for at in range(AT_ONCE)]
            await self.publish(requests)
            for first in range(0, AT_ONCE, at_once):
                own, began = _snapshot(), time.perf_counter()
                await asyncio.gather(*map(self._receive, requests[first : first + at_once]))
                times.append(1e3 * (time.perf_counter() - began) / at_once)
                client += _snapshot() - own
        await asyncio.sleep(AFTER_S)  # the work behind the end is part of a transfer's cost
        cost = {name: await self.fleet.count(each) - before[name] for name, each in daemons.items()}
        return cost | {"client": client}, median(times)

    async def publish(self, requests: list[tuple[str, list[int]]]) -> None:
        assert self.engine.stdin is not None and self.engine.stdout is not None
        self.engine.stdin.write(json.dumps(requests).encode() + b"\n")
        await self.engine.stdout.readline()

    async def _receive(self, request: tuple[str, list[int]]) -> None:
        request_id, ids = request
        await self.rank.client.receive(request_id, {"pool": BlockTable.of(ids)}, source=self.body)

    def count_calls(self, on: bool) -> None:
        sys.setprofile(_profile if on else None)
        for each in self.fleet.services:
            each.process.send_signal(signal.SIGUSR2)


async def measure() -> tuple[list[Cost], dict[str, float]]:
    """(costs, milliseconds of a transfer as the engine sees it, by series)."""
    costs, took = [], {}
    async with _Fleet() as fleet:
        daemons = [fleet.daemon(name) for name in ("source", "reader")]
        await fleet.ready(*daemons, timeout_s=60)
        engine = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "source", str(daemons[0].socket),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert engine.stdin is not None and engine.stdout is not None
        try:
            address = (await engine.stdout.readline()).decode().strip()
            rank = await host.rank(daemons[1], READER, RUN_NBYTES)
            pair = _Pair(fleet, engine, rank, SourceBody(engine_id=SOURCE, address=address))
            await pair.series(1, WARM_UP)
            for at_once in (1, AT_ONCE):
                series = "one after another" if at_once == 1 else f"{at_once} at once"
                total, took[series] = await pair.series(at_once, TRANSFERS)
                pair.count_calls(True)
                profiled, _ = await pair.series(at_once, PROFILED)
                pair.count_calls(False)
                for where, counts in total.items():
                    counts["calls"] = profiled[where]["calls"] * TRANSFERS // PROFILED
                    costs.append(Cost(series, where, {name: counts[name] / TRANSFERS for name in COLUMNS}))
            await rank.client.close()
        finally:
            engine.stdin.close()
            await engine.wait()
    return costs, took


def main() -> int:
    """Print the table; 0 always: there is no budget."""
    count_messages()
    asyncio.set_event_loop_policy(_Policy())
    costs, took = asyncio.run(measure())
    print(f"| series | loop | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for cost in costs:
        print(f"| {cost.series} | {cost.where} | {' | '.join(f'{cost.counts[name]:.1f}' for name in COLUMNS)} |")
    print("order to done, ms each, median: " + ", ".join(f"{series} {ms:.2f}" for series, ms in took.items()))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2], sys.argv[3:]))
    if sys.argv[1:2] == ["source"]:
        asyncio.run(source(sys.argv[2]))
    else:
        sys.exit(main())
