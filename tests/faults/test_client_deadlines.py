"""Every call of the client ends, whatever its daemon does, and says what is not known then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest
from fleet import TIMEOUT_S, Daemons
from google.protobuf.message import Message
from lives import TP1, engine_on, published
from ranks import Blocks, TestEngine

from kvferry import engine as engine_module
from kvferry.blocking import BlockingEngineClient
from kvferry.engine import EngineClient, TransferFailed, Unsettled
from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import DestinationBody, LeaseState, OrderBody
from kvferryd.demo.fleet import DaemonService
from stopping import stopped

pytestmark = pytest.mark.anyio
CALL_S = 0.5
BLOCKS = Blocks((3, 1, 4, 15), 9)


@pytest.fixture(scope="module")
async def daemon(daemons: Daemons) -> DaemonService:
    """It stands still in every test, and goes on after it."""
    return (await daemons.start("still"))[0]


@pytest.fixture
async def engine(daemon: DaemonService, stack: AsyncExitStack, request_id: str) -> TestEngine:
    engine = await TestEngine.start(f"impatient-{request_id[-8:]}", [daemon], TP1)
    stack.push_async_callback(engine.close)
    return engine


@contextmanager
def stands_still(engine: TestEngine) -> Iterator[None]:
    """Its daemon, inside; the client waits CALL_S for it then, and longer for what must succeed before and after."""
    session = engine.ranks[0].client._session
    before, session.call_timeout_s = session.call_timeout_s, CALL_S
    with stopped(engine.daemons[0].process.pid):
        yield
        session.call_timeout_s = before


@pytest.mark.parametrize("call_timeout_s", [CALL_S, 3600])
async def test_a_receive_ends_when_its_daemon_stands_still(
    engine: TestEngine, request_id: str, call_timeout_s: float
) -> None:
    """Soon after its deadline, however long other calls may take."""
    client = engine.ranks[0].client
    with stands_still(engine):
        client._session.call_timeout_s = call_timeout_s
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(TransferFailed) as failed:
                await client.receive(request_id, BLOCKS.tables(), deadline_s=0.5)
        assert failed.value.code == "deadline"
        assert "not known" in str(failed.value)
        assert not failed.value.blocks_safe
        quiesced = asyncio.create_task(failed.value.quiesced())
        await asyncio.sleep(0.2)  # nothing happens: there is no event to wait for
        assert not quiesced.done()
    await asyncio.wait_for(quiesced, TIMEOUT_S)


CALLS: dict[str, Callable[[EngineClient, str], Awaitable[object]]] = {
    "publish": lambda client, request_id: client.publish(request_id, BLOCKS.tables(), 50),
    "abort": lambda client, request_id: client.abort(request_id),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_a_command_ends_when_its_daemon_stands_still(
    engine: TestEngine, request_id: str, call: Callable[[EngineClient, str], Awaitable[object]]
) -> None:
    client = engine.ranks[0].client
    with stands_still(engine):
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(Unsettled) as unsettled:
                await call(client, request_id)
        assert unsettled.value.code == "deadline"
        quiesced = asyncio.create_task(unsettled.value.quiesced())
        await asyncio.sleep(0.2)  # nothing happens: there is no event to wait for
        assert not quiesced.done()
    await asyncio.wait_for(quiesced, TIMEOUT_S)
    # A publish that was not answered in time has been withdrawn: its request id is free.
    await published(engine, request_id)


@pytest.mark.parametrize("how", [Unsettled, asyncio.CancelledError], ids=["not answered", "cancelled"])
async def test_a_publish_after_one_that_has_no_answer_is_another_lease(
    engine: TestEngine, request_id: str, how: type[BaseException]
) -> None:
    """Else its engine would take it for over as the first one ends, and reuse blocks that are served."""
    client = engine.ranks[0].client
    with stands_still(engine) if how is Unsettled else stopped(engine.daemons[0].process.pid):
        first = asyncio.create_task(client.publish(request_id, BLOCKS.tables(), 50))
        await asyncio.sleep(0)
        if how is asyncio.CancelledError:
            first.cancel()
        with pytest.raises(how):
            await first
        client._session.call_timeout_s = TIMEOUT_S
        publishing = asyncio.create_task(client.publish(request_id, BLOCKS.tables(), 20))
        await asyncio.sleep(0)  # it is said now
    lease = await publishing
    assert not lease.over
    await client.abort(request_id)
    async with asyncio.timeout(TIMEOUT_S):
        assert await lease.ended() is LeaseState.REVOKED


async def test_allocating_and_registering_end_when_the_daemon_stands_still(engine: TestEngine) -> None:
    rank = engine.ranks[0]
    with stands_still(engine):
        for call in (rank.client.allocate(1 << 20, 7), rank.client.register(rank.manifest)):
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(KvferryError) as late:
                    await call
            assert late.value.code == "deadline"


async def test_a_receive_whose_deadline_an_order_has_moved_is_not_given_up(
    daemons: Daemons, stack: AsyncExitStack, engine: TestEngine, monkeypatch: pytest.MonkeyPatch, request_id: str
) -> None:
    """The daemon keeps the deadline: while it answers, the client waits for its word."""
    for name in ("GRACE_S", "ANSWER_S"):  # the daemon is not silent, and may be slow
        monkeypatch.setattr(engine_module, name, TIMEOUT_S)
    client, daemon = engine.ranks[0].client, engine.daemons[0]
    (other_daemon,) = await daemons.start("other")
    other, _ = await engine_on(stack, "other", other_daemon)
    probed = asyncio.Event()
    monkeypatch.setattr(client, "_deadline_s", 0.2)  # the daemon's own is 60 s
    send = client._session.send

    def seen(id: int, kind: str, request: Message) -> None:
        if kind == "probe":
            probed.set()
        send(id, kind, request)

    monkeypatch.setattr(client._session, "send", seen)
    receiving = asyncio.create_task(client.receive(request_id, BLOCKS.tables()))
    await asyncio.wait_for(probed.wait(), TIMEOUT_S)
    assert not receiving.done()
    await published(other, request_id)
    async with RouterClient(daemon.url) as router:
        destination = DestinationBody(engine_id=engine.engine_id)
        await router.order(OrderBody(request_id=request_id, source=other.source(), destination=destination))
    assert (await asyncio.wait_for(receiving, TIMEOUT_S)).tokens == (0, 50)


async def test_the_threads_of_a_blocking_client_are_not_kept_either(
    daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    client = await asyncio.to_thread(
        lambda: BlockingEngineClient.connect(
            str(daemon.socket), engine_id="threads", epoch="1", call_timeout_s=TIMEOUT_S
        )
    )
    assert client.client._session.call_timeout_s == TIMEOUT_S
    with stopped(daemon.process.pid):
        client.client._session.call_timeout_s = CALL_S  # attaching may take longer
        receiving = client.receive(request_id, BLOCKS.tables(), deadline_s=0.5)
        with pytest.raises(KvferryError):
            await asyncio.to_thread(receiving.result, TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.to_thread(client.close)
