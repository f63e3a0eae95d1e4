"""The handover socket: garbled handovers, more files than there may be, and files that are not what they should be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Iterator

import pytest
from fleet import TIMEOUT_S
from hostile import Hostile
from raw import RawEngine, raw_engine
from target import Target

from kvferry.memory.handover import LENGTH_NBYTES, MAX_FILES, SUFFIX, framed, sealed_file
from kvferry.v1 import engine_pb2

pytestmark = pytest.mark.anyio
counts = pytest.mark.parametrize("count", [100, pytest.param(1500, marks=pytest.mark.long)])


@contextlib.contextmanager
def odd_files() -> Iterator[list[int]]:
    """Descriptors of every kind that a process may have."""
    with contextlib.ExitStack() as stack:
        found = [os.open(path, os.O_RDONLY) for path in ("/dev/null", "/dev/zero", "/proc/self/maps", "/")]
        found += [sealed_file("good", 4096), os.memfd_create("unsealed"), os.memfd_create("empty"), *os.pipe()]
        found += [each.detach() for each in socket.socketpair()]
        found += [os.eventfd(0), os.pidfd_open(os.getpid())]
        found += [os.open(f"/proc/self/fd/{found[4]}", access) for access in (os.O_RDONLY, os.O_WRONLY)]
        os.ftruncate(found[5], 4096)
        for each in found:
            stack.callback(os.close, each)
        yield found


def exchanged(target: Target, said: bytes, files: list[int], rng: random.Random) -> engine_pb2.HandoverReply | None:
    """Said in one piece or in several, and perhaps not to its end. None: the daemon closed the connection. Blocks."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(TIMEOUT_S)
        door.connect(f"{target.daemon.socket}{SUFFIX}")
        cut = rng.randrange(1, len(said)) if len(said) > 1 and rng.random() < 0.3 else len(said)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(door, [said[:cut]], files)
            if cut < len(said) and rng.random() < 0.8:
                socket.send_fds(door, [said[cut:]], files if rng.random() < 0.5 else [])
            door.shutdown(socket.SHUT_WR)
            with door.makefile("rb") as answer:
                head = answer.read(LENGTH_NBYTES)
                if len(head) == LENGTH_NBYTES:
                    return engine_pb2.HandoverReply.FromString(answer.read(int.from_bytes(head, "big")))
    return None


@counts
async def test_handovers_and_what_is_made_of_them(attacked: Target, rng: random.Random, count: int) -> None:
    making = Hostile(rng, bounded={"nbytes": [0, 1, 4096, 8192, 1 << 45, (1 << 64) - 1]})
    async with raw_engine(attacked) as raw:
        fresh = RawEngine(attacked, raw.channel)
        await fresh.attach()
        making.known = {"session": [fresh.session, fresh.session, raw.session, "none"], "files": [0, 1, 2]}
        with odd_files() as odd:
            for n in range(count):
                if n % 10 == 0:  # a ticket of the other way
                    again = engine_pb2.AllocateRequest(
                        session=fresh.session, region=count, nbytes=4096, idempotency_key="k"
                    )
                    offered = await attacked.judge(fresh.stub.Allocate(again), again)
                    making.learn(offered or engine_pb2.Memory())
                files = [rng.choice(odd) for _ in range(rng.choice([0, 1, 1, 1, 2, 5, MAX_FILES, MAX_FILES + 5]))]
                good = engine_pb2.Handover(session=fresh.session, files=len(files))
                said = framed(making.message(engine_pb2.Handover, good) if rng.random() < 0.4 else good)
                said = making.garbled(said) if rng.random() < 0.3 else said
                reply = await asyncio.to_thread(exchanged, attacked, said or b"\0", files, rng)
                if reply is None:
                    attacked.said["closed"] += 1
                elif reply.HasField("problem"):
                    attacked.judge_problem(reply.problem, said)
                elif reply.ticket:
                    making.learn(reply)
                    await attacked.judge(used(fresh, reply.ticket, making, n), (said, len(files)))
        assert not making.unmet(engine_pb2.Handover)
        await fresh.leave()


async def used(engine: RawEngine, ticket: str, making: Hostile, n: int) -> None:
    """Adopted as memory of either kind, or as a page of fences."""
    if making.rng.random() < 0.3:
        await engine.stub.OpenFences(engine_pb2.OpenFencesRequest(session=engine.session, ticket=ticket))
        return
    handed = engine_pb2.Memory(region=n, nbytes=4096, handed=engine_pb2.HandedFile(ticket=ticket))
    memory = making.message(engine_pb2.Memory, handed) if making.rng.random() < 0.5 else handed
    await engine.stub.Adopt(engine_pb2.AdoptRequest(session=engine.session, memory=memory))
