"""The pipe of a session, at a real daemon: commands and events go by it, and the session ends with it."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest
from fleet import SPOKEN, TIMEOUT_S, Daemons, open_files, refusal, until
from pair import Pair
from victim import Victim, a_good_transfer

from kvferry.engine import EngineClient
from kvferry.memory.handover import SUFFIX, framed, open_pipe
from kvferry.v1 import engine_pb2

pytestmark = pytest.mark.anyio
PROBE = engine_pb2.Command(id=7, probe=engine_pb2.Probe())


class Piped:
    """An engine without a client: its stream, and its pipe by hand."""

    def __init__(self, victim: Victim) -> None:
        self.door, self.call = str(victim.daemon.socket), victim.engine_door.Attach()
        self.session = ""

    async def open(self) -> None:
        await self.attach()
        await self.connect()

    async def connect(self) -> None:
        connection, process = await asyncio.to_thread(open_pipe, self.door, self.session)
        assert process is not None
        process.close()
        self.reader, self.writer = await asyncio.open_unix_connection(sock=connection)

    async def attach(self) -> None:
        attach = engine_pb2.AttachRequest(**SPOKEN, engine_id="piped", epoch=os.urandom(8).hex(), world_size=1)
        await self.call.write(engine_pb2.Command(attach=attach))
        self.session = (await self.call.read()).attached.session

    async def event(self) -> engine_pb2.Event:
        async with asyncio.timeout(TIMEOUT_S):
            length = int.from_bytes(await self.reader.readexactly(4), "big")
            return engine_pb2.Event.FromString(await self.reader.readexactly(length))

    async def the_end(self) -> object:
        """The stream's, and the pipe's with it."""
        async with asyncio.timeout(TIMEOUT_S):
            told = await self.call.read()
            assert await self.reader.read() == b""
            return told


@pytest.fixture
async def piped(victim: Victim) -> AsyncIterator[Piped]:
    async with opened(victim) as engine:
        yield engine


@asynccontextmanager
async def opened(victim: Victim) -> AsyncIterator[Piped]:
    engine = Piped(victim)
    try:
        await engine.open()
        yield engine
    finally:
        engine.call.cancel()
        if engine.session:
            engine.writer.close()
            await victim.engine_door.End(engine_pb2.EndRequest(session=engine.session, leave=True))


async def test_answers_and_what_is_told_unasked_come_by_the_pipe(piped: Piped, victim: Victim) -> None:
    piped.writer.write(framed(PROBE) + framed(engine_pb2.Command(id=8, abort=engine_pb2.EngineAbortRequest())))
    assert [(await piped.event()).answer.id for _ in range(2)] == [7, 8]
    await victim.engine_door.End(engine_pb2.EndRequest(session=piped.session))
    assert await piped.the_end() is grpc.aio.EOF


async def test_several_in_one_are_taken_too(piped: Piped) -> None:
    piped.writer.write(framed(engine_pb2.Command(several=engine_pb2.Commands(commands=[PROBE] * 3))))
    assert [(await piped.event()).answer.id for _ in range(3)] == [7] * 3


async def test_a_session_has_one_pipe(piped: Piped, victim: Victim) -> None:
    refused = await refusal(asyncio.to_thread(open_pipe, piped.door, piped.session))
    assert (refused.code, refused.field) == ("pipe_open", "pipe")
    assert refused.remedy
    piped.writer.write(framed(PROBE))
    assert (await piped.event()).answer.id == 7, "the first one goes on"
    assert (await refusal(asyncio.to_thread(open_pipe, piped.door, "x"))).code == "unknown_session"


async def test_commands_do_not_come_both_ways(piped: Piped) -> None:
    await piped.call.write(PROBE)
    refused = await refusal(piped.the_end())
    assert (refused.code, refused.field) == ("malformed_stream", "kind")
    assert refused.remedy


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"\xff" * 64, "malformed_stream"),
        (framed(PROBE)[:4] + b"\xff" * 4, "malformed_message"),
        (framed(engine_pb2.Command(several=engine_pb2.Commands(commands=[PROBE] * 257))), "malformed_command"),
    ],
)
async def test_what_is_no_command_ends_the_session_by_name(
    pair: Pair, piped: Piped, victim: Victim, request_id: str, said: bytes, code: str
) -> None:
    piped.writer.write(said)
    refused = await refusal(piped.call.read())
    assert refused.code == code
    assert refused.remedy
    await a_good_transfer(pair, victim, request_id)


async def test_the_session_ends_with_its_pipe(piped: Piped) -> None:
    piped.writer.write(framed(PROBE))
    piped.writer.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert await piped.call.read() is grpc.aio.EOF


async def test_the_pipe_ends_with_its_session(victim: Victim) -> None:
    before = open_files(victim.daemon)
    async with opened(victim) as engine:
        engine.call.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            assert await engine.reader.read() == b""

    async def closed() -> bool:
        return open_files(victim.daemon) <= before

    await until(closed, f"{open_files(victim.daemon)} open files are {before} again")


async def test_a_client_whose_pipe_breaks_has_no_session_any_more(victim: Victim) -> None:
    """A proxy between that loses one of its connections, for example."""
    async with await EngineClient.connect(
        str(victim.daemon.socket), engine_id="broken", epoch=os.urandom(8).hex(), timeout_s=TIMEOUT_S
    ) as client:
        assert client._session._pipe is not None
        client._session._pipe.abort()
        async with asyncio.timeout(TIMEOUT_S):
            await client.closed.wait()
            await client.over.wait()
        assert (await refusal(client.abort("r"))).code == "daemon_gone"


async def test_a_pipe_that_nobody_waits_for_any_more_leaves_the_stream_as_it_is(victim: Victim) -> None:
    """The daemon was busy when it was asked for, and the engine goes on by the stream."""
    engine, daemon = Piped(victim), psutil.Process(victim.daemon.process.pid)
    try:
        await engine.attach()
        daemon.suspend()
        with socket.socket(socket.AF_UNIX) as given_up:
            given_up.connect(f"{engine.door}{SUFFIX}")
            given_up.sendall(framed(engine_pb2.Handover(session=engine.session, pipe=True)))
        daemon.resume()
        for _ in range(3):
            await engine.call.write(PROBE)
            assert (await engine.call.read()).answer.id == PROBE.id
    finally:
        daemon.resume()
        engine.call.cancel()
        await victim.engine_door.End(engine_pb2.EndRequest(session=engine.session, leave=True))


async def test_a_pipe_for_which_no_descriptor_is_left_can_be_asked_for_again(victim: Victim) -> None:
    """The daemon has one descriptor for the connection, and none for the pipe."""
    engine, pid = Piped(victim), victim.daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    try:
        await engine.attach()
        held = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        free = next(number for number in itertools.count() if number not in held)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            refused = await refusal(asyncio.to_thread(open_pipe, engine.door, engine.session))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert refused.code == "handover_failed"
        await engine.connect()
        engine.writer.write(framed(PROBE))
        assert (await engine.event()).answer.id == PROBE.id
        engine.writer.close()
    finally:
        engine.call.cancel()
        await victim.engine_door.End(engine_pb2.EndRequest(session=engine.session, leave=True))


async def test_without_the_handover_socket_the_stream_has_all(pair: Pair, daemons: Daemons, request_id: str) -> None:
    (daemon,) = await daemons.start("streamed")
    os.unlink(f"{daemon.socket}{SUFFIX}")
    async with await EngineClient.connect(
        str(daemon.socket), engine_id="streamed", epoch=os.urandom(8).hex(), timeout_s=TIMEOUT_S
    ) as client:
        assert client._session._pipe is None
        await client.abort(request_id)
