"""The handover socket of a real daemon: files for tickets, adopted memory without a path, and the page of fences."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from tempfile import TemporaryDirectory

import pytest
from fleet import TIMEOUT_S, Daemons, open_files, owned_regions, refusal, until
from lives import TP1, fences_of, killable, published
from ranks import Blocks, Kv, Rank, TestEngine, describe
from victim import Victim

from kvferry.engine import EngineClient, TransferFailed
from kvferry.file import File
from kvferry.memory import memfd_region
from kvferry.memory.fences import Fence
from kvferry.memory.handover import MAX_FILES, SUFFIX, framed, hand_over, sealed_file
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferry.v1 import engine_pb2
from kvferryd.api.handover import HELD_S, MAX_CONNECTIONS
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio


def door(victim: Victim) -> str:
    return str(victim.daemon.socket)


def own(victim: Victim) -> str:
    """The session of the victim's engine."""
    return victim.engine.ranks[0].client._session.id


async def given(victim: Victim, files: list[int], session: str = "") -> str:
    ticket, process = await asyncio.to_thread(hand_over, door(victim), session or own(victim), files)
    assert process is not None
    process.close()
    return ticket


async def files_are_closed(victim: Victim, before: int, timeout_s: float = HELD_S + TIMEOUT_S) -> None:
    async def closed() -> bool:
        return open_files(victim.daemon) <= before

    await until(closed, f"{open_files(victim.daemon)} open files are {before} again", timeout_s)


def adopt(victim: Victim, ticket: str, session: str = "", nbytes: int = 4096):
    memory = engine_pb2.Memory(region=9, nbytes=nbytes, handed=engine_pb2.HandedFile(ticket=ticket))
    return victim.engine_door.Adopt(engine_pb2.AdoptRequest(session=session or own(victim), memory=memory))


@pytest.mark.parametrize("what", ["memory", "fences"])
async def test_a_daemon_without_a_descriptor_names_its_limit(what: str, victim: Victim) -> None:
    """The file has come; to map it takes another descriptor."""
    pid = victim.daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    async with await EngineClient.connect(door(victim), engine_id="short", epoch=os.urandom(8).hex()) as client:
        session = client._session.id
        with File(sealed_file("k", 4096)) as file:
            ticket = await given(victim, [file.fileno()], session)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            if what == "memory":
                error = await refusal(adopt(victim, ticket, session))
            else:
                request = engine_pb2.OpenFencesRequest(session=session, ticket=ticket)
                error = await refusal(victim.engine_door.OpenFences(request))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert (error.code, error.field, error.value) == ("out_of_descriptors", "RLIMIT_NOFILE", "3")
    assert "LimitNOFILE" in error.remedy


async def test_the_socket_is_for_its_own_user_only(victim: Victim) -> None:
    mode = os.stat(door(victim) + SUFFIX).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def said_by(path: str, uid: int) -> bytes:
    """The answer to another user who connects to a socket: a process of his own asks."""
    told, telling = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(TIMEOUT_S)
                connection.connect(path)
                os.write(telling, b"connected " + connection.recv(4096))
        except OSError as error:
            os.write(telling, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(telling)
    os.waitpid(child, 0)
    with open(told, "rb") as answer:
        return answer.read()


async def test_another_user_gets_through_neither_socket(daemons: Daemons) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can ask as another user")
    with TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        path = f"{folder}/engine.sock"
        await daemons.start("others", 1, "--engine-socket", path)
        for each in (path, path + SUFFIX):
            assert await asyncio.to_thread(said_by, each, 65534) == b"PermissionError"
            os.chmod(each, 0o666)
        assert b"wrong_user" in await asyncio.to_thread(said_by, path + SUFFIX, 65534), "the kernel says who calls"
        assert b"wrong_user" not in await asyncio.to_thread(said_by, path + SUFFIX, 0)


async def test_files_that_nobody_asks_for_are_closed(victim: Victim) -> None:
    before = open_files(victim.daemon)
    file = sealed_file("test", 4096)
    tickets = {await given(victim, [file, file]) for _ in range(3)}
    assert len(tickets) == 3
    assert open_files(victim.daemon) >= before + 6
    os.close(file)
    await files_are_closed(victim, before)
    for ticket in tickets:
        assert (await refusal(adopt(victim, ticket))).code == "unknown_ticket"


async def test_a_ticket_is_for_one_session_and_one_call(victim: Victim) -> None:
    before = open_files(victim.daemon)
    other = await EngineClient.connect(door(victim), engine_id="other", epoch=os.urandom(8).hex())
    file = sealed_file("test", 4096)
    ticket = await given(victim, [file])
    assert (await refusal(adopt(victim, ticket, session=other._session.id))).code == "unknown_ticket"
    # The victim has registered, so nothing is adopted: the files are closed all the same.
    assert (await refusal(adopt(victim, ticket))).code == "region_taken"
    assert (await refusal(adopt(victim, ticket))).code == "unknown_ticket"
    os.close(file)
    await other.close()
    await files_are_closed(victim, before)


async def test_a_ticket_goes_one_way(victim: Victim) -> None:
    """Files that the engine hands over are not fetched, and memory of the daemon's is not adopted."""
    async with await EngineClient.connect(door(victim), engine_id="other", epoch=os.urandom(8).hex()) as other:
        asked = engine_pb2.AllocateRequest(session=other.session, nbytes=4096)
        allocated = (await victim.engine_door.Allocate(asked)).handed.ticket
        assert (await refusal(adopt(victim, allocated, other.session))).code == "unknown_ticket"
        opening = engine_pb2.OpenFencesRequest(session=other.session, ticket=allocated)
        assert (await refusal(victim.engine_door.OpenFences(opening))).code == "unknown_ticket"
        (await other._session.fetch(allocated)).close()
        with File(sealed_file("test", 4096)) as file:
            handed = await given(victim, [file.fileno()], other.session)
        assert (await refusal(other._session.fetch(handed))).code == "unknown_ticket"
        await adopt(victim, handed, other.session)


async def test_memory_that_is_allocated_again_and_again_and_never_fetched_is_bounded(victim: Victim) -> None:
    before = open_files(victim.daemon)
    async with await EngineClient.connect(door(victim), engine_id="other", epoch=os.urandom(8).hex()) as other:
        asked = engine_pb2.AllocateRequest(session=other.session, nbytes=4096, idempotency_key="k")
        calls = (victim.engine_door.Allocate(asked) for _ in range(MAX_FILES + 1))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Exception) for answer in answers) == 1
        assert (await refusal(victim.engine_door.Allocate(asked))).code == "too_many_files"
    await files_are_closed(victim, before)


@pytest.mark.parametrize("access", [os.O_RDONLY, os.O_WRONLY])
async def test_a_file_that_may_not_be_mapped_is_refused_by_name(victim: Victim, access: int) -> None:
    """For a page of fences that was `internal`."""
    async with await EngineClient.connect(door(victim), engine_id="other", epoch=os.urandom(8).hex()) as other:
        with File(sealed_file("test", 4096)) as file, File(os.open(f"/proc/self/fd/{file.fileno()}", access)) as same:
            if access == os.O_WRONLY:
                opening = engine_pb2.OpenFencesRequest(session=other.session)
                opening.ticket = await given(victim, [same.fileno()], other.session)
                assert (await refusal(victim.engine_door.OpenFences(opening))).code == "region_unavailable"
            ticket = await given(victim, [same.fileno()], other.session)
            assert (await refusal(adopt(victim, ticket, other.session))).code == "region_unavailable"


async def test_what_is_no_handover_is_refused_and_its_files_closed(victim: Victim) -> None:
    before = open_files(victim.daemon)
    file = sealed_file("test", 4096)
    handover = engine_pb2.Handover(session=own(victim), files=1)
    said = {
        "malformed_handover": [
            b"\xff" * 64,
            framed(engine_pb2.Handover(session=own(victim), files=2)),
            framed(engine_pb2.Handover(session=own(victim))),  # and a file that it does not name
            framed(handover) + b"more",
            (6).to_bytes(4, "big") + b"\xff" * 6,
        ],
        "unknown_session": [framed(engine_pb2.Handover(session="x", files=1))],
    }
    for code, messages in said.items():
        for message in messages:
            reply = await asyncio.to_thread(answer, victim, message, [file])
            assert (reply.problem.code, reply.ticket) == (code, ""), message
            assert reply.problem.remedy
    os.close(file)
    await files_are_closed(victim, before)


def answer(victim: Victim, message: bytes, files: list[int]) -> engine_pb2.HandoverReply:
    with socket.socket(socket.AF_UNIX) as handing:
        handing.settimeout(60)
        handing.connect(door(victim) + SUFFIX)
        socket.send_fds(handing, [message], files)
        held = b""
        while more := handing.recv(4096):
            held += more
        return engine_pb2.HandoverReply.FromString(held[4:])


async def test_too_many_files_are_refused_and_closed(victim: Victim) -> None:
    before = open_files(victim.daemon)
    file = sealed_file("test", 4096)
    message = framed(engine_pb2.Handover(session=own(victim), files=MAX_FILES + 1))
    reply = await asyncio.to_thread(answer, victim, message, [file] * (MAX_FILES + 1))
    assert reply.problem.code == "too_many_files"
    await given(victim, [file] * MAX_FILES)
    assert (await refusal(given(victim, [file]))).code == "too_many_files", "so many are held for this session"
    assert (await refusal(given(victim, [file] * (MAX_FILES + 1)))).code == "too_many_files"
    os.close(file)
    await files_are_closed(victim, before)


async def test_those_who_say_nothing_keep_an_engine_waiting_and_not_out(victim: Victim) -> None:
    before = open_files(victim.daemon)
    with ExitStack() as silent:
        for _ in range(MAX_CONNECTIONS + 4):
            silent.enter_context(socket.socket(socket.AF_UNIX)).connect(door(victim) + SUFFIX)
        file = sealed_file("test", 4096)
        assert await given(victim, [file])
        os.close(file)
    await files_are_closed(victim, before)


async def test_one_that_says_nothing_or_half_of_it_is_not_waited_for(victim: Victim) -> None:
    before = open_files(victim.daemon)
    file = sealed_file("test", 4096)
    message = framed(engine_pb2.Handover(session=own(victim), files=1))
    idlers = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for idler in idlers:  # more than are served at once
        idler.settimeout(60)
        idler.connect(door(victim) + SUFFIX)
    for idler in idlers[:3]:
        socket.send_fds(idler, [message[:6]], [file])
    await asyncio.gather(*(asyncio.to_thread(ends, idler) for idler in idlers))
    assert await given(victim, [file])
    os.close(file)
    await files_are_closed(victim, before)


def ends(idler: socket.socket) -> None:
    with idler:
        assert idler.recv(4096) == b"", "the daemon closes it"


async def test_an_engine_that_dies_between_the_two_leaves_no_file(victim: Victim) -> None:
    before = open_files(victim.daemon)
    script = (
        "import sys, time; from kvferry.memory.handover import hand_over, sealed_file;"
        "print(hand_over(sys.argv[1], sys.argv[2], [sealed_file('x', 4096)] * 5), flush=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, door(victim), own(victim), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await files_are_closed(victim, before)


# adopted memory and fences, over the wire


@asynccontextmanager
async def engine(daemon: DaemonService, name: str) -> AsyncIterator[TestEngine]:
    """A rank whose memory is a memfd of ours, which the daemon adopts: no file has a name."""
    epoch = os.urandom(8).hex()
    async with await EngineClient.connect(str(daemon.socket), engine_id=name, epoch=epoch, timeout_s=20) as client:
        region = memfd_region(TP1.nbytes(0))
        await client.adopt(region)
        manifest = describe(name, epoch, TP1, 0, region)
        await client.register(manifest)
        yield TestEngine(name, epoch, TP1, [daemon], [Rank(client, region, manifest)], iter(range(16)), iter(range(16)))
    region.close()


async def test_memory_without_a_path_is_adopted_both_ways(
    far: DaemonService, near: DaemonService, request_id: str
) -> None:
    tail = request_id[-8:]
    async with engine(far, f"s-{tail}") as source, engine(near, f"d-{tail}") as destination:
        kv, _ = await published(source, request_id)
        await destination.gets(request_id, kv, source=source.source())


async def test_a_region_that_could_shrink_is_not_adopted(victim: Victim) -> None:
    async with await EngineClient.connect(door(victim), engine_id="loose", epoch=os.urandom(8).hex()) as client:
        region = memfd_region(4096)
        region.file = File(os.memfd_create("loose"))
        os.ftruncate(region.file.fileno(), 4096)
        assert (await refusal(client.adopt(region))).code == "region_unavailable"
        region.close()


async def test_a_reader_gets_what_was_there_when_the_fence_was_reached(
    far: DaemonService, near: DaemonService, request_id: str
) -> None:
    tail = request_id[-8:]
    async with engine(far, f"s-{tail}") as source, engine(near, f"d-{tail}") as destination:
        fences = await fences_of(source.ranks[0])
        kv, blocks, fence = Kv.random(50), source.take(50), fences.take()
        (lease,) = await source.publish(request_id, blocks, 50, after=fence)
        receiving = asyncio.create_task(destination.gets(request_id, kv, source=source.source()))
        await asyncio.sleep(0.3)
        assert not receiving.done()
        source.write(kv, blocks)  # long after the publish
        fences.reach(fence)
        async with asyncio.timeout(TIMEOUT_S):
            await receiving
            await lease.ended()
        fences.close()


async def test_a_fence_that_is_never_reached_fails_the_reader_and_tells_the_engine(
    daemons: Daemons, near: DaemonService, request_id: str
) -> None:
    (hasty,), tail = await daemons.start("hasty", 1, "--fence-timeout-s", "0.5"), request_id[-8:]
    async with engine(hasty, f"s-{tail}") as source, engine(near, f"d-{tail}") as destination:
        fences = await fences_of(source.ranks[0])
        (lease,) = await source.publish(request_id, source.take(50), 50, after=fences.take())
        (outcome,) = await destination.outcomes(request_id, destination.take(50), source=source.source())
        assert isinstance(outcome, TransferFailed)
        assert outcome.code == "fence_timeout", outcome
        with refused("fence_timeout", field="fence_timeout_s") as told:
            await lease.ended()
        assert told.value.remedy
        (again,) = await source.publish(request_id, source.take(50), 50)
        assert again.request_id == request_id, "the request can be published again"
        fences.close()


async def test_an_engine_killed_while_a_fence_is_pending_leaves_nothing(
    daemons: Daemons, near: DaemonService, request_id: str
) -> None:
    (daemon,) = await daemons.start("survivor")
    async with engine(near, f"d-{request_id[-8:]}") as destination, RouterClient(daemon.url) as router:
        before = -1
        for n in range(2):
            name = f"mortal-{n}"
            async with killable(daemon, name, "publish-behind-a-fence", request_id) as process:
                source = SourceBody(engine_id=name, address=daemon.peer)

                async def read_by_one(request_id: str = request_id) -> bool:
                    held = await router.leases()
                    return [lease.readers_open for lease in held if lease.request_id == request_id] == [1]

                receiving = asyncio.create_task(destination.outcomes(request_id, destination.take(50), source=source))
                await until(read_by_one, "the reader has the lease open")
                process.kill()
            async with asyncio.timeout(TIMEOUT_S):
                (outcome,) = await receiving
            assert isinstance(outcome, TransferFailed)
            assert outcome.blocks_safe

            async def gone(before: int = before) -> bool:
                return not owned_regions(daemon) and (before < 0 or open_files(daemon) <= before)

            await until(gone, "its memory, page and files are gone")
            await asyncio.sleep(0.5)
            before = open_files(daemon)


async def test_a_fence_without_its_page_is_refused(victim: Victim, request_id: str) -> None:
    blocks = Blocks((1,), 1)
    with refused("no_fences", field="after") as caught:
        await victim.engine.ranks[0].client.publish(request_id, blocks.tables(), 1, after=Fence(0, 1))
    assert caught.value.remedy


async def test_an_engine_on_host_memory_has_no_stream_to_fence(victim: Victim) -> None:
    with refused("fence_on_host", field="stream") as caught:
        await victim.engine.ranks[0].client.fence(0)
    assert caught.value.remedy
