"""An engine that takes none of its events: what waits for it is bounded, and it is let go by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from fleet import TIMEOUT_S, refusal

from kvferry.engine import EngineClient
from kvferry.memory.handover import framed, open_pipe
from kvferry.rpc import MESSAGE_OPTIONS, PROTOCOL_MAX
from kvferry.v1 import engine_pb2, engine_pb2_grpc
from kvferryd.api import engine as door
from kvferryd.api.engine import ANSWERS
from kvferryd.config import Config
from kvferryd.engine.session import Session
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics
from kvferryd.process.serve import _engine_server

pytestmark = pytest.mark.anyio
EACH = 256
WRONG = engine_pb2.Command(
    several=engine_pb2.Commands(
        commands=[engine_pb2.Command(id=1 + number, publish=engine_pb2.PublishRequest()) for number in range(EACH)]
    )
)


@pytest.fixture(scope="module")
async def ferry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ferry]:
    """Its engines have a second to take an event. For all tests: what gRPC still has to do for one needs its loop."""
    socket = tmp_path_factory.mktemp("unread") / "engine.sock"
    ferry = Ferry(Config(engine_socket=socket), Metrics())
    async with _engine_server(ferry):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(door, "UNREAD_S", 1.0)
            yield ferry
        await ferry.close()


class Silent:
    """An engine that says what it has to say and reads nothing but that it is attached."""

    def __init__(self, ferry: Ferry, stub: engine_pb2_grpc.EngineStub, name: str) -> None:
        self.call, self._ferry, self._name = stub.Attach(), ferry, name

    async def attach(self) -> Session:
        attach = engine_pb2.AttachRequest(
            protocol_min=PROTOCOL_MAX, protocol_max=PROTOCOL_MAX, engine_id=self._name, epoch="1", world_size=1
        )
        await self.call.write(engine_pb2.Command(attach=attach))
        told = await self.call.read()
        return self._ferry.registry.of_session(told.attached.session)

    async def say(self) -> None:
        """Without end. Each is answered with a problem, of some hundred bytes."""
        while True:
            await self.call.write(WRONG)

    def close(self) -> None:
        pass

    async def the_end(self) -> object:
        """The end of the stream, as an engine sees it that reads at last."""
        while (told := await self.call.read()) is not grpc.aio.EOF:
            assert isinstance(told, engine_pb2.Event)
        return told


class SilentByPipe(Silent):
    """The same, by its pipe."""

    async def attach(self) -> Session:
        session = await super().attach()
        connection, process = await asyncio.to_thread(open_pipe, str(self._ferry.config.engine_socket), session.id)
        assert process is not None
        process.close()
        self._pipe = connection
        return session

    def close(self) -> None:
        self._pipe.close()

    async def say(self) -> None:
        with contextlib.suppress(OSError):  # the daemon has closed it
            while True:
                await asyncio.get_running_loop().sock_sendall(self._pipe, framed(WRONG))

    async def the_end(self) -> object:
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self._pipe, 1 << 16):
                pass
        return await super().the_end()


@pytest.fixture(params=[Silent, SilentByPipe])
async def silent(ferry: Ferry, request_id: str, request: pytest.FixtureRequest) -> AsyncIterator[Silent]:
    address = f"unix:{ferry.config.engine_socket}"
    async with grpc.aio.insecure_channel(address, options=MESSAGE_OPTIONS) as channel:
        engine = request.param(ferry, engine_pb2_grpc.EngineStub(channel), request_id)
        yield engine
        engine.close()


async def _gone(session: Session) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await session.retired.wait()


async def test_an_engine_that_sends_and_takes_no_answer_is_let_go(ferry: Ferry, silent: Silent) -> None:
    session = await silent.attach()
    most = 0

    async def watched() -> None:
        nonlocal most
        while session.attached:
            most = max(most, len(session.events))
            await asyncio.sleep(0.01)

    saying, watching = asyncio.create_task(silent.say()), asyncio.create_task(watched())
    await _gone(session)
    assert ANSWERS <= most < ANSWERS + EACH, "commands wait while answers do"
    assert not len(session.events)
    await watching
    async with asyncio.timeout(TIMEOUT_S):
        await refusal(silent.the_end())  # gRPC loses the status of a call whose caller is writing when it ends
        await asyncio.wait([saying])
    saying.exception()


async def test_what_an_engine_is_told_unasked_is_bounded(ferry: Ferry, silent: Silent) -> None:
    session = await silent.attach()
    for _ in range(2 * session.most_events):
        session.tell(engine_pb2.Event(draining=engine_pb2.Draining()))
    assert len(session.events) == session.most_events + 1
    await _gone(session)
    async with asyncio.timeout(TIMEOUT_S):
        assert (await refusal(silent.the_end())).code == "events_not_taken"


async def test_an_engine_that_is_told_nothing_stays(ferry: Ferry) -> None:
    client = await EngineClient.connect(str(ferry.config.engine_socket), engine_id="e", epoch="1", timeout_s=TIMEOUT_S)
    await asyncio.sleep(3.5)
    await client.abort("r")
    assert ferry.registry.of_session(client.session).attached
    await client.close()
