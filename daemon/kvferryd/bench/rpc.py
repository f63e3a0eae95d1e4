"""The floor of the control path: a message there and an answer back between two processes, through grpc.aio alone."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc

from kvferryd.bench.child import child, tell

UNARY, STREAM = "/bench/Unary", "/bench/Stream"
MESSAGE = b"x" * 100
REPEATS, WARM_UP, LIMIT_S = 1000, 100, 20.0


@dataclass(frozen=True, slots=True)
class RoundTrip:
    what: str
    median_us: float


def measure() -> list[RoundTrip]:
    """Medians of REPEATS round trips of 100 bytes. Raises TimeoutError after LIMIT_S, KvferryError (`child_ended`)."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        socket = Path(folder) / "rpc.sock"
        with child("kvferryd.bench.rpc", str(socket)) as told:
            return asyncio.run(_measure(f"unix:{socket}", f"127.0.0.1:{told['port']}"))


async def _measure(unix: str, tcp: str) -> list[RoundTrip]:
    found = []
    async with asyncio.timeout(LIMIT_S):
        for where, address in (("a Unix socket", unix), ("TCP loopback", tcp)):
            async with grpc.aio.insecure_channel(address) as channel:
                unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(UNARY)
                found.append(RoundTrip(f"unary call over {where}", await _median_us(lambda: unary(MESSAGE))))  # noqa: B023
                opened: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM)
                stream = opened()

                async def exchange() -> None:
                    await stream.write(MESSAGE)  # noqa: B023
                    await stream.read()  # noqa: B023

                found.append(RoundTrip(f"message and answer on a stream over {where}", await _median_us(exchange)))
                await stream.done_writing()
    return found


async def _median_us(round_trip: Callable[[], Awaitable[object]]) -> float:
    taken = []
    for _ in range(REPEATS + WARM_UP):
        began = time.perf_counter()
        await round_trip()
        taken.append(time.perf_counter() - began)
    return 1e6 * median(taken[WARM_UP:])


def main() -> int:
    """Print the table; 0 always: there is no budget."""
    show(measure())
    return 0


def show(found: list[RoundTrip]) -> None:
    print("| grpc.aio between two processes, 100 bytes each way | median us |\n|---|---|")
    for each in found:
        print(f"| {each.what} | {each.median_us:.0f} |", flush=True)


async def _serve(socket: str) -> None:
    async def unary(request: bytes, context: object) -> bytes:
        return request

    async def stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        UNARY.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(unary),
        STREAM.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(stream),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell({"port": port})
    await asyncio.to_thread(sys.stdin.read)  # until the one that measures ends


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
