"""The engine client against a daemon whose every word is written here: events that come late, early or never."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from caches import attention, cache

from kvferry import blocking as blocking_module
from kvferry import engine as engine_module
from kvferry.blocking import BlockingEngineClient, Receipt
from kvferry.engine import EngineClient, Received, TransferFailed, Unsettled
from kvferry.errors import KvferryError, Unavailable
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import CudaRegion, VmmMemory, memfd_region
from kvferry.memory import cuda as cuda_module
from kvferry.memory.cuda import Mapping
from kvferry.memory.fences import Fences
from kvferry.outcomes import Pending
from kvferry.session import Session
from kvferry.tables import BlockTable
from kvferry.threads import made
from kvferry.v1 import engine_pb2, engine_pb2_grpc
from support import refused

pytestmark = pytest.mark.anyio
TABLES, OTHERS = {"full": BlockTable.of([1, 2])}, {"full": BlockTable.of([3, 4])}


class Daemon(engine_pb2_grpc.EngineServicer):
    """Says what it is told to. Transfers are named t0, t1 and so on, in the order of the receives."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[engine_pb2.Event] = asyncio.Queue()
        self.heard: list[str] = []
        self.more = asyncio.Event()
        self.answers = asyncio.Event()
        """While it is not set no command is answered."""
        self.answers.set()
        self.ending, self.ends = asyncio.Event(), asyncio.Event()
        """It was asked to end the session; while `ends` is not set it does not answer."""
        self.ends.set()
        self.instance = ""
        """The instance of the daemon that says that the session has ended."""
        self.attached = self.left = 0
        """Sessions that were opened, and those that an engine has ended that ends itself."""
        self.refuses = False
        self.resumes, self.address = False, "127.0.0.1:1"
        """A session that is attached resumes one; the address by which other daemons reach this one."""
        self.lease = 0
        """The number of the last that was published."""

    async def Attach(
        self, commands: AsyncIterator[engine_pb2.Command], context: Any
    ) -> AsyncIterator[engine_pb2.Event]:
        assert (await anext(aiter(commands))).HasField("attach")
        self.attached += 1
        self.more.set()
        attached = engine_pb2.Attached(
            session="s", peer_address=self.address, device="cpu", deadline_s=60, resumed=self.resumes
        )
        yield engine_pb2.Event(attached=attached)
        listening = asyncio.create_task(self._listen(commands))
        try:
            while True:
                yield await self.events.get()
        finally:
            listening.cancel()

    async def Register(self, request: engine_pb2.RegisterRequest, context: Any) -> engine_pb2.RegisterReply:
        self.heard.append("register")
        self.more.set()
        await self.answers.wait()
        return engine_pb2.RegisterReply()

    async def End(self, request: engine_pb2.EndRequest, context: Any) -> engine_pb2.EndReply:
        self.left += request.leave
        self.more.set()
        self.ending.set()
        await self.ends.wait()
        return engine_pb2.EndReply(instance=self.instance)

    async def _listen(self, commands: AsyncIterator[engine_pb2.Command]) -> None:
        async for command in commands:
            answer = engine_pb2.Answer(id=command.id)
            if command.HasField("receive"):
                number = sum(word.startswith("receive") for word in self.heard)
                answer.receive.transfer_id = f"t{number}"
                self.heard.append(f"receive {list(command.receive.tables.groups['full'].block_ids)}")
            else:
                self.lease = command.publish.lease or self.lease
                self.heard.append(str(command.WhichOneof("kind")))
            self.more.set()
            await self.answers.wait()
            if self.refuses:
                answer.problem.code = "refused"
            self.events.put_nowait(engine_pb2.Event(answer=answer))

    async def until(self, *heard: str) -> None:
        await self.until_so(lambda: self.heard == list(heard))

    async def until_so(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not so():
                self.more.clear()
                await self.more.wait()

    def end_lease(self, state: str) -> None:
        ended = engine_pb2.LeaseEnded(request_id="R", lease=self.lease, state=state)
        self.events.put_nowait(engine_pb2.Event(lease_ended=ended))

    def end(self, transfer_id: str, state: str = "done", *, safe: bool = True) -> None:
        ended = engine_pb2.TransferEnded(request_id="R", transfer_id=transfer_id, state=state, blocks_safe=safe)
        self.events.put_nowait(engine_pb2.Event(transfer_ended=ended))

    def safe(self, transfer_id: str) -> None:
        self.events.put_nowait(
            engine_pb2.Event(blocks_safe=engine_pb2.BlocksSafe(request_id="R", transfer_id=transfer_id))
        )

    def drain(self) -> None:
        self.events.put_nowait(engine_pb2.Event(draining=engine_pb2.Draining()))


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[Daemon, str]]:
    daemon, server, path = Daemon(), grpc.aio.server(), str(tmp_path / "s")
    engine_pb2_grpc.add_EngineServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield daemon, path
    finally:
        await server.stop(0)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Daemon, EngineClient]]:
    async with served(tmp_path) as (daemon, path), await EngineClient.connect(path, engine_id="e", epoch="1") as client:
        yield daemon, client


Both = tuple[Daemon, EngineClient]


async def everything_heard(daemon: Daemon, client: EngineClient) -> None:
    """Events are heard in order: when the client knows of this one it knows of those before."""
    client.draining.clear()
    daemon.drain()
    async with asyncio.timeout(60):
        await client.draining.wait()


async def fails(work: Awaitable[object], code: str = "session_closed") -> KvferryError:
    with refused(code) as told:
        async with asyncio.timeout(60):
            await work
    return told.value


async def cancelled(task: asyncio.Task[Any], timeout_s: float = 10) -> None:
    task.cancel()
    await asyncio.wait([task], timeout=timeout_s)
    assert task.cancelled()


class Broken(Exception):
    """A failure beside a receive."""


async def timed_out(receive: Awaitable[object]) -> None:
    async with asyncio.timeout(0.05):
        await receive


async def waited_for(receive: Awaitable[object]) -> None:
    await asyncio.wait_for(receive, 0.05)


async def timed_out_within(receive: Awaitable[object]) -> None:
    """The outer one passes while the inner one waits for the blocks."""
    async with asyncio.timeout(0.06), asyncio.timeout(0.05):
        await receive


async def in_a_group(receive: Awaitable[object]) -> None:
    async def fail() -> None:
        raise Broken

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await receive
    except* Broken as failed:
        raise failed.exceptions[0] from None


CANCELLED: dict[str, tuple[Callable[[Awaitable[object]], Awaitable[None]], type[Exception]]] = {
    "timeout": (timed_out, TimeoutError),
    "wait_for": (waited_for, TimeoutError),
    "two timeouts": (timed_out_within, TimeoutError),
    "TaskGroup": (in_a_group, Broken),
}


@pytest.mark.parametrize(("cancel", "raised"), CANCELLED.values(), ids=CANCELLED.keys())
async def test_whatever_cancels_a_receive_its_blocks_are_waited_for_by_the_name_of_the_request(
    both: Both,
    monkeypatch: pytest.MonkeyPatch,
    cancel: Callable[[Awaitable[object]], Awaitable[None]],
    raised: type[Exception],
) -> None:
    """A daemon that says nothing holds it only so long."""
    monkeypatch.setattr(engine_module, "LEAVE_S", 0.1)
    daemon, client = both
    daemon.answers.clear()
    with pytest.raises(raised):
        async with asyncio.timeout(60):
            await cancel(client.receive("R", TABLES))
    await daemon.until("receive [1, 2]")
    quiesced = asyncio.create_task(client.quiesced("R"))
    await client.quiesced("Q")  # nothing was said of it
    client._session.call_timeout_s = 0.1
    await fails(client.receive("R", OTHERS), "receive_pending")
    assert daemon.heard == ["receive [1, 2]"]
    daemon.answers.set()
    await daemon.until("receive [1, 2]", "abort")
    daemon.end("t0", "aborted", safe=False)
    await everything_heard(daemon, client)
    assert not quiesced.done()
    daemon.safe("t0")
    await asyncio.wait_for(quiesced, 60)
    assert not client._book.sizes()["receives"]


@pytest.mark.parametrize("taken", [False, True])
async def test_the_blocks_of_a_publish_that_is_cancelled_are_waited_for_in_the_same_way(
    both: Both, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """taken: in the turn in which it is cancelled."""
    daemon, client = both
    daemon.answers.clear()
    publishing = asyncio.create_task(client.publish("R", TABLES, 5))
    await daemon.until("publish")
    if taken:
        (pending,) = client._book._calls
        assert isinstance(pending, Pending)
        tell = pending.tell

        def tell_and_cancel(*end: KvferryError) -> None:
            tell(*end)
            publishing.cancel()
            daemon.answers.clear()

        monkeypatch.setattr(pending, "tell", tell_and_cancel)
        daemon.answers.set()
    else:
        publishing.cancel()
    await asyncio.wait([publishing])
    assert publishing.cancelled()
    quiesced = asyncio.create_task(client.quiesced("R"))
    await everything_heard(daemon, client)
    assert not quiesced.done()
    daemon.answers.set()
    await asyncio.wait_for(quiesced, 60)
    assert daemon.heard == ["publish", "abort"]


async def test_whether_blocks_are_quiet_is_never_known_of_a_client_that_is_closed(both: Both) -> None:
    daemon, client = both
    daemon.answers.clear()
    client._session.call_timeout_s = 0.1
    with pytest.raises(TransferFailed):
        await client.receive("R", TABLES)
    quiesced = asyncio.create_task(client.quiesced("R"))
    await asyncio.sleep(0)
    await client.close()
    for waiting in (quiesced, client.quiesced("R")):
        await fails(waiting)


@pytest.mark.parametrize("named", [False, True])
async def test_a_receive_ends_soon_after_its_deadline_however_long_other_calls_may_take(
    both: Both, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """`call_timeout_s` is for calls without a deadline of their own."""
    monkeypatch.setattr(engine_module, "GRACE_S", 0.1)
    daemon, client = both
    client._session.call_timeout_s = 3600
    if not named:
        daemon.answers.clear()
    receiving = asyncio.create_task(client.receive("R", TABLES, deadline_s=0.1))
    await daemon.until("receive [1, 2]")
    if named:
        await everything_heard(daemon, client)
        daemon.answers.clear()
    async with asyncio.timeout(60):
        with pytest.raises(TransferFailed) as failed:
            await receiving
    assert (failed.value.code, failed.value.field, failed.value.blocks_safe) == ("deadline", "deadline_s", False)
    daemon.answers.set()
    daemon.end("t0", "aborted")
    await asyncio.wait_for(failed.value.quiesced(), 60)
    await client.abort("Q")  # answered after all that was said before
    assert not any(client._book.sizes().values())


async def test_a_daemon_has_the_same_time_for_each_question_about_an_overdue_receive(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the pause between them is."""
    daemon, client = both
    monkeypatch.setattr(engine_module, "PROBE_S", engine_module.GRACE_S)
    receiving = asyncio.create_task(client.receive("R", TABLES, deadline_s=0.1))
    await daemon.until("receive [1, 2]", "probe", "probe")
    await everything_heard(daemon, client)
    assert not receiving.done()
    daemon.end("t0")
    assert (await asyncio.wait_for(receiving, 60)).transfer_id == "t0"


async def test_a_daemon_that_refuses_to_answer_for_an_overdue_receive_is_there(both: Both) -> None:
    """Its blocks are in doubt until its end is told: a refusal would say that nothing was reserved."""
    daemon, client = both
    receiving = asyncio.create_task(client.receive("R", TABLES, deadline_s=0.1))
    await daemon.until("receive [1, 2]")
    await everything_heard(daemon, client)
    daemon.heard.clear()
    daemon.refuses = True
    await daemon.until_so(lambda: "probe" in daemon.heard)
    await everything_heard(daemon, client)
    daemon.end("t0", "failed", safe=False)
    with pytest.raises(TransferFailed) as failed:
        await asyncio.wait_for(receiving, 60)
    assert not failed.value.blocks_safe
    daemon.safe("t0")
    await asyncio.wait_for(failed.value.quiesced(), 60)


@pytest.mark.parametrize("state", ["vanished", "publishing", ""])
async def test_an_end_that_is_not_known_ends_the_session(both: Both, state: str) -> None:
    daemon, client = both
    receiving = asyncio.create_task(client.receive("R", TABLES))
    await daemon.until("receive [1, 2]")
    if state == "publishing":
        lease = await client.publish("R", TABLES, 5)
        daemon.end_lease(state)
    else:
        daemon.end("t0", state)
    with pytest.raises(TransferFailed) as failed:
        await receiving
    await failed.value.quiesced()
    assert (failed.value.code, failed.value.field, failed.value.value) == ("malformed_event", "state", state)
    await fails(client.publish("R", TABLES, 5), "malformed_event")
    if state == "publishing":
        with pytest.raises(KvferryError):
            await lease.ended()


async def test_what_is_withdrawn_is_safe_or_said_not_to_be_known(both: Both) -> None:
    daemon, client = both
    await client.publish("R", TABLES, 5)
    await client.withdraw("R")
    client._session.call_timeout_s = 0.1
    daemon.answers.clear()
    with refused("deadline", Unsettled, blocks_safe=False) as unknown:
        await client.withdraw("R")
    daemon.answers.set()
    await unknown.value.quiesced()


@pytest.mark.parametrize(
    ("call", "field", "value", "wanted"),
    [
        (lambda client: client.publish("R", TABLES, 5, metadata="text"), "metadata", "text", "bytes"),
        (lambda client: client.publish("R", TABLES, 5, digest="text"), "digest", "text", "bytes"),
        (lambda client: client.publish("R", TABLES, 5.0), "num_tokens", "5.0", "an integer"),
        (lambda client: client.publish(7, TABLES, 5), "request_id", "7", "text"),
        (lambda client: client.publish("R", TABLES, 5, ttl_s="9"), "ttl_s", "9", "a number"),
        (lambda client: client.publish("R", TABLES, 5, lease=1 << 70), "lease", str(1 << 70), "an integer"),
        (lambda client: client.receive("R", TABLES, digest="text"), "digest", "text", "bytes"),
        (lambda client: client.receive("R", TABLES, source="10.0.0.7:7411"), "source", "10.0.0.7:7411", "Source"),
        (lambda client: client.receive("R", TABLES, (0, 5.0)), "tokens", "{'start': 0, 'stop': 5.0}", "TokenRange"),
        (lambda client: client.allocate(5.0), "nbytes", "5.0", "an integer"),
        (lambda client: client.abort(7), "request_id", "7", "text"),
    ],
)
async def test_a_value_of_another_type_is_named(
    both: Both, call: Callable[[EngineClient], Awaitable[object]], field: str, value: str, wanted: str
) -> None:
    told = await fails(call(both[1]), "malformed_request")
    assert (told.field, told.value) == (field, value)
    assert wanted in told.remedy


async def test_a_builder_in_place_of_its_manifest_is_named(both: Both) -> None:
    builder: Any = ManifestBuilder("e", "1", ModelInfo(name="m", fingerprint="f"))
    told = await fails(both[1].register(builder), "malformed_manifest")
    assert (told.field, told.value) == ("manifest", "ManifestBuilder")
    assert "build()" in told.remedy


CALLS: dict[str, Callable[[EngineClient], Awaitable[object]]] = {
    "allocate": lambda client: client.allocate(1),
    "adopt": lambda client: client.adopt(memfd_region(1)),
    "publish": lambda client: client.publish("R", TABLES, 5),
    "receive": lambda client: client.receive("R", TABLES),
    "abort": lambda client: client.abort("R"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_a_call_after_close_says_that_the_session_is_closed(
    both: Both, call: Callable[[EngineClient], Awaitable[object]]
) -> None:
    _, client = both
    await client.close()
    await fails(call(client))


@pytest.mark.parametrize("answered", [True, False])
async def test_who_waits_at_close_hears_that_the_session_is_closed(both: Both, answered: bool) -> None:
    daemon, client = both
    lease = await client.publish("L", TABLES, 5)
    if not answered:
        daemon.answers.clear()
    receiving = asyncio.create_task(client.receive("R", TABLES))
    await daemon.until("publish", "receive [1, 2]")
    others = [asyncio.create_task(client.abort("R"))] if not answered else []
    await asyncio.sleep(0.05)
    await client.close()
    for waiting in (receiving, lease.ended(), *others):
        await fails(waiting)


async def test_an_engine_that_closes_after_its_session_was_lost_leaves_all_the_same(both: Both) -> None:
    """The daemon would keep its memory for a session that resumes this one."""
    daemon, client = both
    daemon.end_lease("vanished")
    await asyncio.wait_for(client.over.wait(), 60)
    await client.close()
    assert daemon.left == 1


async def test_a_client_whose_session_another_one_resumes_does_not_leave(tmp_path: Path) -> None:
    async with served(tmp_path) as (daemon, path):
        client = await EngineClient.connect(path, engine_id="e", epoch="1")
        daemon.end_lease("vanished")
        await asyncio.wait_for(client.over.wait(), 60)
        again = await EngineClient.connect(path, engine_id="e", epoch="1", resume=client)
        await client.close()
        assert daemon.left == 0
        await again.close()
        assert daemon.left == 1


async def test_a_caller_that_is_cancelled_while_the_session_closes_is_cancelled(both: Both) -> None:
    daemon, client = both
    daemon.answers.clear()
    calling = asyncio.create_task(client.abort("R"))
    await daemon.until("abort")
    closing = asyncio.create_task(client.close())
    await cancelled(calling)
    await closing


async def test_threads_hear_the_same(tmp_path: Path) -> None:
    async with served(tmp_path) as (daemon, path):
        with ThreadPoolExecutor() as threads:

            async def off(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
                return await asyncio.get_running_loop().run_in_executor(threads, lambda: call(*args, **more))

            client = await off(BlockingEngineClient.connect, path, engine_id="e", epoch="1", call_timeout_s=3600)
            first = client.receive("R", TABLES)
            await daemon.until("receive [1, 2]")
            first.cancel()
            second = client.receive("R", OTHERS)  # at once, as nothing tells when a cancelled future is through
            await daemon.until("receive [1, 2]", "abort")
            daemon.end("t0", "aborted")
            await daemon.until("receive [1, 2]", "abort", "receive [3, 4]")
            daemon.answers.clear()
            calling = asyncio.create_task(off(client.abort, "Q"))
            await daemon.until("receive [1, 2]", "abort", "receive [3, 4]", "abort")
            await off(client.close)  # an hour before the calls are given up
            again = (client.abort, lambda request_id: client.receive(request_id, TABLES))
            for waiting in (asyncio.wrap_future(second), calling, *(off(call, "R") for call in again)):
                await fails(waiting)


async def test_a_client_that_is_closed_between_two_attachments_that_fail_leaves_all_the_same(tmp_path: Path) -> None:
    """The daemon would keep the memory for the next of them."""
    said: queue.Queue[str] = queue.Queue()
    async with served(tmp_path) as (daemon, path):
        connect = partial(BlockingEngineClient.connect, path, engine_id="e", epoch="1", say=said.put)
        client = await asyncio.to_thread(connect)
        daemon.resumes, daemon.address = True, "127.0.0.1:2"  # readers were told another one
        daemon.end_lease("vanished")
        while "is not attached" not in await asyncio.to_thread(said.get, timeout=60):
            pass
        assert daemon.left == 0
        await asyncio.to_thread(client.close)
        assert daemon.left == 1


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a future with a timeout of its own finds it run out."""
    result = Future.result
    monkeypatch.setattr(Future, "result", lambda future, timeout=None: result(future, None if timeout is None else 0))


BLOCKING: dict[str, Callable[[BlockingEngineClient], object]] = {
    "publish": lambda client: client.publish("R", TABLES, 2),
    "abort": lambda client: client.abort("R"),
    "replace_weights": lambda client: client.replace_weights("B"),
    "another": lambda client: client.call(client.client.withdraw("R")),
}


@pytest.mark.parametrize("call", BLOCKING.values(), ids=BLOCKING.keys())
async def test_a_thread_waits_for_a_call_as_long_as_the_call_says(
    tmp_path: Path, no_patience: None, call: Callable[[BlockingEngineClient], object]
) -> None:
    async with served(tmp_path) as (daemon, path):
        connect = BlockingEngineClient.connect
        client = await asyncio.to_thread(connect, path, engine_id="e", epoch="1", call_timeout_s=0.2)
        daemon.answers.clear()
        try:
            with pytest.raises(Unsettled, match=r"call_timeout_s = 0\.2"):
                await asyncio.to_thread(call, client)
        finally:
            await asyncio.to_thread(client.close)


def test_a_thread_hears_that_there_is_no_daemon(tmp_path: Path, no_patience: None) -> None:
    with refused("unreachable"):
        BlockingEngineClient.connect(str(tmp_path / "s"), engine_id="e", epoch="1", timeout_s=0.1)


def receipt(client: BlockingEngineClient) -> Receipt:
    """Its receive never ends."""

    async def receive() -> Received:
        return await asyncio.get_running_loop().create_future()

    return client._give(receive(), client._receipt)


CALLS: dict[str, Callable[[BlockingEngineClient], object]] = {
    "call": lambda client: client.call(asyncio.sleep(0), 5),
    "close": BlockingEngineClient.close,
    "result": lambda client: client.start(asyncio.sleep(0)).result(5),
    "exception": lambda client: client.start(asyncio.sleep(0)).exception(5),
    "a receipt's result": lambda client: receipt(client).result(5),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_blocking_call_in_a_callback_is_refused(call: Callable[[BlockingEngineClient], object]) -> None:
    client, told = BlockingEngineClient("/nowhere", EngineClient.connect), Future[None]()
    goes_on = asyncio.Event()

    def blocks(_: object) -> None:
        try:
            call(client)
        except KvferryError as error:
            told.set_exception(error)
        else:
            told.set_result(None)

    client.start(goes_on.wait()).add_done_callback(blocks)
    client._loop.call_soon_threadsafe(goes_on.set)
    with refused("call_in_callback", match="another thread"):
        told.result(60)
    client.close()


def test_a_callback_has_the_result_of_a_future_that_is_done() -> None:
    client, told = BlockingEngineClient("/nowhere", EngineClient.connect), Future[tuple[int, BaseException | None]]()
    goes_on = asyncio.Event()

    async def work() -> int:
        await goes_on.wait()
        return 7

    begun = client.start(work())
    begun.add_done_callback(lambda done: told.set_result((done.result(), begun.exception(0))))
    client._loop.call_soon_threadsafe(goes_on.set)
    assert told.result(60) == (7, None)
    client.close()


def test_a_future_that_is_cancelled_ends_its_work() -> None:
    client, ended = BlockingEngineClient("/nowhere", EngineClient.connect), threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    begun = client.start(work())
    client.call(asyncio.sleep(0))
    assert begun.cancel() and begun.cancelled()
    assert ended.wait(60)
    client.close()


def test_what_a_thread_begins_while_another_closes_ends_or_is_refused() -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    def begin(client: BlockingEngineClient) -> list[Future[None]]:
        begun = []
        with suppress(KvferryError):
            while True:
                begun.append(client.start(work()))
        with pytest.raises(KvferryError, match="the session is closed"):
            client.start(work())
        return begun

    with ThreadPoolExecutor() as threads:
        for _ in range(25):
            client = BlockingEngineClient("/nowhere", EngineClient.connect)
            beginning = [threads.submit(begin, client) for _ in range(2)]
            time.sleep(0.002)
            client.close()
            for each in beginning:
                assert all(future.done() for future in each.result(60))


def test_a_call_that_would_never_end_is_cancelled_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_module, "END_S", 0.1)
    client = BlockingEngineClient("/nowhere", EngineClient.connect)
    with ThreadPoolExecutor() as threads:
        begun = client.start(asyncio.sleep(3600))
        calling = threads.submit(client.call, asyncio.sleep(3600), 60)
        while len(asyncio.all_tasks(client._loop)) < 2:
            time.sleep(0.001)
        client.close()
        assert begun.cancelled()
        with pytest.raises(KvferryError, match="the session is closed"):
            calling.result(60)


def test_a_callback_that_exits_ends_no_client(caplog: pytest.LogCaptureFixture) -> None:
    """SystemExit ends the loop that runs the callback."""
    client, said = BlockingEngineClient("/nowhere", EngineClient.connect), asyncio.Event()

    def leave(_: object) -> None:
        raise SystemExit

    client.start(said.wait()).add_done_callback(leave)

    async def say() -> None:
        said.set()

    client.call(say())
    client.call(asyncio.sleep(0.01), 10)
    client.close()
    assert client._loop.is_closed()
    assert "SystemExit" in caplog.text


def test_close_waits_for_what_a_task_under_way_begins_at_its_end() -> None:
    ended = []

    async def last() -> None:
        await asyncio.sleep(0.05)
        ended.append("last")

    async def first() -> None:
        await asyncio.sleep(0.05)
        ended.append(asyncio.create_task(last(), name="last").get_name())

    client = BlockingEngineClient("/nowhere", EngineClient.connect)
    client.start(first())
    client.close()
    assert ended == ["last", "last"]
    client.close()


def test_a_close_that_is_interrupted_ends_the_client_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads wait for their calls without a deadline."""
    monkeypatch.setattr(blocking_module, "END_S", 1)
    client = BlockingEngineClient("/nowhere", EngineClient.connect)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

    async def interrupted() -> None:
        closing = False
        while not closing:
            try:
                client._give(asyncio.sleep(0), asyncio.ensure_future)
            except KvferryError:
                closing = True
            await asyncio.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.sleep(3600)

    with ThreadPoolExecutor() as threads:
        client.start(interrupted())
        calling = threads.submit(client.call, asyncio.sleep(3600), None)
        with pytest.raises(KeyboardInterrupt):
            client.close()
        signal.signal(signal.SIGINT, before)
        with pytest.raises(KvferryError, match="the session is closed"):
            calling.result(60)
        client.close()
        assert client._loop.is_closed()


async def test_a_listener_that_fails_keeps_no_engine_from_attaching_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def say(words: str) -> None:
        loop.call_soon_threadsafe(said.put_nowait, words)
        raise SystemExit(words)

    async with served(tmp_path) as (daemon, path):
        client = await asyncio.to_thread(BlockingEngineClient.connect, path, engine_id="e", epoch="1", say=say)
        try:
            async with asyncio.timeout(60):
                for _ in range(2):
                    before = client.client
                    daemon.end_lease("vanished")
                    assert "has gone" in await said.get()
                    assert "there again" in await said.get()
                    assert client.client is not before
                    assert await asyncio.to_thread(client.abort, "R") is None
        finally:
            await asyncio.to_thread(client.close)
    assert "kvferry's `say` failed" in caplog.text


async def test_a_session_that_was_not_taken_up_yet_ends_with_the_client(tmp_path: Path) -> None:
    async with served(tmp_path) as (daemon, path):
        client = await asyncio.to_thread(
            BlockingEngineClient.connect, path, engine_id="e", epoch="1", say=lambda words: None
        )
        holds, goes_on = threading.Event(), asyncio.Event()

        async def hold() -> None:
            async with client._noting:
                holds.set()
                await goes_on.wait()

        holding = client.start(hold())
        await asyncio.to_thread(holds.wait, 60)
        daemon.end_lease("vanished")
        await daemon.until_so(lambda: daemon.attached == 2)
        async with asyncio.timeout(60):
            while not client._noting._waiters:  # noqa: ASYNC110  nothing tells that the next session waits there
                await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(client.close))
        await daemon.until_so(lambda: daemon.left > 0)
        client._loop.call_soon_threadsafe(goes_on.set)
        await closing
        holding.result(60)
        assert daemon.left == 1


async def test_no_fences_are_made_for_a_client_that_is_closed(both: Both) -> None:
    _, client = both
    client.device = "cuda:0"
    await client.close()
    await fails(client.open_fences())
    assert client._page is None


async def test_replaced_weights_have_their_new_name_though_the_daemon_has_gone(tmp_path: Path) -> None:
    """It is told when it registers the cache again."""
    async with served(tmp_path) as (_, path):
        client = await EngineClient.connect(path, engine_id="e", epoch="1")
        await client.close()
        with pytest.raises(KvferryError, match="closed"):
            await client.replace_weights("B")
        assert client.weights == "B"
        again = await EngineClient.connect(path, engine_id="e", epoch="1", resume=client)
        assert again.weights == "B"
        await again.close()


async def test_replacing_weights_ends_though_a_daemon_never_confirms_the_end_of_its_session(both: Both) -> None:
    daemon, client = both
    client._session.call_timeout_s = 0.2
    daemon.ends.clear()
    daemon.end_lease("vanished")
    await asyncio.wait_for(daemon.ending.wait(), 60)
    with pytest.raises(Unsettled) as unknown:
        async with asyncio.timeout(30):
            await client.replace_weights("B")
    assert not unknown.value.blocks_safe
    assert client.weights == "B"


async def test_a_close_that_is_cancelled_ends_the_session_all_the_same(both: Both) -> None:
    daemon, client = both
    daemon.ends.clear()
    closing = asyncio.create_task(client.close())
    await daemon.ending.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not client.over.is_set(), "nobody knows yet"
    daemon.ends.set()
    async with asyncio.timeout(60):
        await client.over.wait()
    assert client.closed.is_set()
    with pytest.raises(KvferryError, match="closed"):
        await client.publish("R", TABLES, 2)


class SlowGpu:
    """A driver that registers memory only when the GPU has time."""

    def __init__(self) -> None:
        self.begun, self.going, self.gone = threading.Event(), threading.Event(), threading.Event()
        self.went = False

    @property
    def closed(self) -> bool:
        return self.gone.is_set()

    def register(self, address: int, nbytes: int) -> Any:
        self.begun.set()
        self.went = self.going.wait(10)
        return self

    def close(self) -> None:
        self.gone.set()


async def test_a_close_that_waits_for_the_gpu_holds_up_nothing_else(both: Both) -> None:
    _, client = both
    page, gpu = Fences(), SlowGpu()
    client._page = page
    registering = asyncio.create_task(asyncio.to_thread(page.register, gpu))  # type: ignore[arg-type]
    await asyncio.to_thread(gpu.begun.wait, 60)
    closing = asyncio.create_task(client.close())
    await client.over.wait()
    gpu.going.set()
    await registering
    await asyncio.wait_for(closing, 60)
    assert gpu.went, "the loop stood still until it was too late"
    assert gpu.closed


async def test_a_close_ends_though_a_gpu_never_does(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that is registered at last is let go of by its thread."""
    _, client = both
    page, gpu = Fences(), SlowGpu()
    monkeypatch.setattr(engine_module, "PAGE_S", 0.1)
    client._page = page
    registering = asyncio.create_task(asyncio.to_thread(page.register, gpu))  # type: ignore[arg-type]
    await asyncio.to_thread(gpu.begun.wait, 60)
    await client.close()
    assert not gpu.closed, "it has waited for the GPU"
    assert "page of fences" in caplog.text
    gpu.going.set()
    await registering
    await asyncio.to_thread(gpu.gone.wait, 60)
    assert gpu.closed


@pytest.mark.parametrize("how", ["late", "cancelled", "the loop ends"])
def test_what_is_made_for_nobody_is_ended_by_its_thread(how: str) -> None:
    going, ended = threading.Event(), threading.Event()

    async def wait() -> asyncio.Task[bool]:
        making = made("test", lambda: going.wait(60), 0.1 if how == "late" else 60, lambda _: ended.set())
        task = asyncio.create_task(making)
        await asyncio.sleep(0)
        if how == "cancelled":
            task.cancel()
        if how != "the loop ends":
            with pytest.raises(TimeoutError if how == "late" else asyncio.CancelledError):
                await task
        return task

    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait())
    loop.close()
    gc.collect()
    going.set()
    assert ended.wait(60)


async def test_fences_that_a_gpu_never_registers_are_reported(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = both
    gpu = SlowGpu()
    monkeypatch.setattr(engine_module.cuda, "device", lambda name: gpu)
    client.device, client._session.call_timeout_s = "cuda:0", 0.1
    with refused("deadline", match="GPU", field="call_timeout_s") as late:
        await client.open_fences()
    assert "again" in late.value.remedy
    gpu.going.set()


async def test_a_cache_whose_description_takes_too_long_blames_no_gpu(both: Both) -> None:
    _, client = both
    client._session.call_timeout_s = 0
    with refused("deadline", match="describe the cache", field="call_timeout_s") as late:
        await client.register(cache(*attention()))
    assert "GPU" not in f"{late.value.message} {late.value.remedy}"


class SlowDevice:
    """A GPU of whose driver each call waits."""

    index, uuid = 0, "GPU-0"

    def __init__(self) -> None:
        self.going = threading.Event()

    def __enter__(self) -> None:
        self.going.wait(10)
        raise Unavailable("cuda_failed", "this machine has no GPU")

    def __exit__(self, *_: object) -> None: ...

    def allocation(self, address: int) -> tuple[int, int]:
        with self:
            return 0, 0


def mapped(gpu: Any) -> CudaRegion:
    return CudaRegion(0, "cuda", 4096, 0, gpu, Mapping(gpu, b"", 4096))


async def unmaps(client: EngineClient, gpu: Any) -> None:
    cuda_module._mappings[gpu.index, b""] = [4096, 1]
    await client.unmap(mapped(gpu))


WAITS: dict[str, Callable[[EngineClient, Any], Awaitable[object]]] = {
    "vmm": lambda client, gpu: client.adopt(VmmMemory(0, 4096, 4096, gpu)),
    "ipc": lambda client, gpu: client.adopt(mapped(gpu)),
    "unmap": unmaps,
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS.keys())
async def test_memory_that_a_gpu_does_not_export_or_unmap_holds_up_nothing_else(
    both: Both, call: Callable[[EngineClient, Any], Awaitable[object]]
) -> None:
    _, client = both
    gpu = SlowDevice()
    client._session.call_timeout_s = 0.1
    late = await fails(call(client, gpu), "deadline")
    assert late.field == "call_timeout_s" and "GPU" in str(late)
    gpu.going.set()


async def test_memory_of_the_host_is_unmapped(both: Both) -> None:
    _, client = both
    region = memfd_region(4096)
    await client.unmap(region)
    assert region.file.fileno() < 0
    await client.unmap(region)


LISTENS = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print("listens", flush=True)
    connection, _ = listening.accept()
    connection.recv(1 << 14)
"""
HANDOVERS = f"""{LISTENS}
    connection.sendall(bytes(4))  # an answer without a ticket
    sys.stdin.read()
"""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


GIVES = f"""{LISTENS}
    print("asked", flush=True)
    sys.stdin.readline()
    socket.send_fds(connection, [bytes(4)], [0])
    sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["fetch", "hand_over"])
def test_no_descriptor_is_left_when_the_loop_ends_during_an_exchange(tmp_path: Path, what: str) -> None:
    """Its thread goes on, and has nobody to give its result to."""

    async def exchange(session: Session, asked: Callable[[], bytes]) -> None:
        work = session.fetch("t") if what == "fetch" else session.hand_over([0])
        exchanging.append(asyncio.create_task(work))  # type: ignore[arg-type]  # one or the other
        await asyncio.to_thread(asked)
        await session.close()

    exchanging: list[asyncio.Task[object]] = []
    command = [sys.executable, "-c", GIVES, str(tmp_path / "s.fd")]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon,
        ThreadPoolExecutor() as threads,
    ):
        assert daemon.stdin is not None and daemon.stdout is not None
        daemon.stdout.readline()
        before, loop = open_files(), asyncio.new_event_loop()
        loop.set_default_executor(threads)
        session = loop.run_until_complete(session_of(str(tmp_path / "s")))
        loop.run_until_complete(exchange(session, daemon.stdout.readline))
        loop.close()
        daemon.stdin.write(b"go on\n")
        daemon.stdin.flush()
        for thread in threading.enumerate():
            if thread.name == "kvferry-exchange":
                thread.join(60)
        exchanging.clear()
        del session, loop
        gc.collect()
        assert open_files() <= before
        daemon.stdin.close()


@pytest.mark.parametrize("what", ["fetch", "hand_over"])
def test_an_exchange_waits_for_no_other_work_of_the_loop(tmp_path: Path, what: str) -> None:
    """Engines wait for their GPU there."""
    going = threading.Event()

    async def exchange() -> None:
        asyncio.get_running_loop().set_default_executor(threads)
        session = await session_of(str(tmp_path / "s"))
        async with asyncio.timeout(20):
            with pytest.raises(KvferryError) as failed:
                await (session.fetch("t") if what == "fetch" else session.hand_over([]))
        assert failed.value.code == "handover_failed"
        await session.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(going.wait, 60)
        threads.submit(going.wait, 60)
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(exchange())
        finally:
            going.set()
            loop.close()


async def session_of(path: str) -> Session:
    return Session(path, lambda event: None, lambda why: None, lambda unknown: None)


async def test_files_that_are_too_many_to_copy_are_not_handed_over_and_none_is_left(tmp_path: Path) -> None:
    session, file = await session_of(str(tmp_path / "s")), os.open("/dev/null", os.O_RDONLY)
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, limits[1]))
    try:
        with refused("handover_failed", match="ulimit"):
            await session.hand_over([file] * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() <= before
    os.close(file)
    await session.close()


async def test_a_daemon_that_is_known_only_when_its_session_has_ended_is_watched_too(
    both: Both, tmp_path: Path
) -> None:
    """The first hand-over has failed, and another daemon has the socket when a later one is through."""
    daemon, client = both
    daemon.ends.clear()
    lease = await client.publish("R", TABLES, 5)
    daemon.end_lease("vanished")
    await asyncio.wait_for(daemon.ending.wait(), 60)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HANDOVERS, str(tmp_path / "s.fd"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        await client._session.hand_over([])
        daemon.instance = "another"
        daemon.ending.clear()
        daemon.ends.set()
        await asyncio.wait_for(daemon.ending.wait(), 60)
        assert not client.over.is_set(), "its process lives"
    finally:
        process.kill()
    await asyncio.wait_for(client.over.wait(), 60)
    await process.wait()
    with pytest.raises(KvferryError, match="nobody reads it"):
        await lease.ended()
