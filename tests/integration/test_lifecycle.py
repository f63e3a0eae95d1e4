"""How daemons come, drain and are killed, and what the others see of it."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import TIMEOUT_S, Daemons, ended, logged, under_way, until
from lives import engine_on, published, reads_from
from pair import Pair, prefilled
from ranks import Kv

from kvferry import __version__
from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.memory.handover import SUFFIX
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import LeaseState, OrderBody, TransferState
from kvferryd.demo import fleet
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio


# drain


@pytest.fixture(scope="module")
async def daemon(shared_daemons: Daemons) -> DaemonService:
    """The daemon of those tests that leave it as they found it."""
    (daemon,) = await shared_daemons.start("drained")
    return daemon


async def test_sigterm_waits_until_leases_are_read_and_then_exits_0(
    pair: Pair, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("drain-a", 1, "--drain-timeout-s", "60")
    engine, router = await engine_on(stack, "drain-a", daemon)
    kv, leases = await published(engine, request_id)
    daemon.signal(signal.SIGTERM)
    await asyncio.wait_for(engine.ranks[0].client.draining.wait(), TIMEOUT_S)
    status = await router.drain_status()
    assert (status.draining, status.leases, status.drained) == (True, 1, False)
    assert (await router.ready()).reasons == ["draining"]
    with refused("draining", DaemonError, status=503):
        await router.order(OrderBody(request_id=f"{request_id}-more", source=pair.prefill.source()))
    assert daemon.process.poll() is None

    await pair.decode.gets(request_id, kv, source=engine.source())
    assert await leases[0].ended() is LeaseState.RELEASED
    assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0
    await asyncio.wait_for(engine.ranks[0].client.closed.wait(), TIMEOUT_S)
    assert not daemon.socket.exists()


SILENT = """\
import socket, sys, threading
from kvferryd.commands.cli import main

look_up = socket.getaddrinfo
def looked_up(host, *about, **more):
    if host == "silent.test":
        threading.Event().wait()
    return look_up(host, *about, **more)

socket.getaddrinfo = looked_up
sys.exit(main())
"""


async def test_a_name_that_nobody_answers_for_keeps_no_daemon_from_its_end(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver is waited for for minutes, and under a keeper the next daemon waits for this one's end."""
    monkeypatch.setattr(fleet, "_kvferry", lambda arguments: [sys.executable, "-c", SILENT, *arguments])
    (daemon,) = await daemons.start(
        "asks", 1, "--known-peers", "silent.test:7411", "--allow-peers", "127.0.0.0/8,*.test"
    )
    daemon.signal(signal.SIGTERM)
    assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0


HANGS = """\
import os, sys, threading
from kvferryd.commands.cli import main

read = os.pread
def reads(*about):
    if threading.current_thread() is not threading.main_thread():
        print("the disk hangs", file=sys.stderr, flush=True)
        threading.Event().wait()
    return read(*about)

os.pread = reads
sys.exit(main())
"""


async def test_a_thread_that_waits_for_a_disk_keeps_no_daemon_from_its_end(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_kvferry", lambda arguments: [sys.executable, "-c", HANGS, *arguments])
    (daemon,) = await daemons.start("waits")

    async def hangs() -> bool:
        return "the disk hangs" in daemon.log.read_text()

    async with RouterClient(daemon.url) as router, under_way(router.history()):
        await until(hangs, "the history is read")
        daemon.signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0


async def test_a_state_folder_keeps_the_history_of_a_daemon_that_is_killed(
    pair: Pair, daemons: Daemons, stack: AsyncExitStack, request_id: str, tmp_path: Path
) -> None:
    (daemon,) = await daemons.start("keeps", 1, "--state", str(tmp_path / "state"))
    engine, router = await engine_on(stack, "keeps", daemon)
    kv, _ = await prefilled(pair, request_id)
    await engine.gets(request_id, kv, source=pair.prefill.source())
    waits = await router.order(OrderBody(request_id=f"{request_id}-waits", source=pair.prefill.source()))
    second = daemons.fleet.daemon("too-many", flags=["--state", str(tmp_path / "state")])
    assert await asyncio.to_thread(second.process.wait, TIMEOUT_S) != 0
    assert "another daemon has" in second.log.read_text()
    daemon.process.kill()
    await asyncio.to_thread(daemon.process.wait)
    again = daemons.fleet.again(daemon)
    await daemons.fleet.ready(again, timeout_s=TIMEOUT_S)
    records = {each.request_id: each for each in await router.transfers()}
    assert records[request_id].state is TransferState.DONE
    died = records[f"{request_id}-waits"]
    assert died.transfer_id == waits.transfer_id and died.error is not None and died.error.code == "daemon_died"
    for record in (records[request_id], died):
        assert await router.transfer(record.transfer_id, wait_s=20) == record == await router.wait(record.transfer_id)
        assert await router.abort_transfer(record.transfer_id) == record, "it stays as it ended"
    told = await router.history()
    assert sum(each.done for each in told.points) == sum(each.failed for each in told.points) == 1
    assert [mark.kind.value for mark in told.marks] == ["start", "death", "start"]


async def test_a_drain_ends_when_the_last_lease_expires(
    daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    engine, router = await engine_on(stack, "drain-b", daemon)
    await published(engine, request_id, ttl_s=0.5)
    status = await router.drain(wait_s=20)
    assert (status.leases, status.drained) == (0, True)
    await router.cancel_drain()


async def test_a_drain_that_is_asked_for_does_not_end_the_daemon(
    pair: Pair, daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    engine, router = await engine_on(stack, "drain-c", daemon)
    kv, _ = await published(engine, request_id)
    assert not (await router.drain()).drained
    waiting = asyncio.create_task(router.drain(wait_s=20))
    await pair.decode.gets(request_id, kv, source=engine.source())
    assert (await waiting).drained
    assert await router.healthy()
    await router.cancel_drain()


async def test_what_an_engine_publishes_while_its_daemon_drains_is_read_and_waited_for(
    pair: Pair, daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    """Its requests are computed already. To send it no more is the router's part, or the engine's, which is told."""
    engine, router = await engine_on(stack, "drain-g", daemon)
    await published(engine, f"{request_id}-before")
    waiting = asyncio.create_task(router.drain(wait_s=20))
    await asyncio.wait_for(engine.ranks[0].client.draining.wait(), TIMEOUT_S)
    kv, leases = await published(engine, request_id)
    await router.revoke_lease(f"{request_id}-before")
    assert (await router.drain_status()).leases == 1 and not waiting.done()
    await pair.decode.gets(request_id, kv, source=engine.source())
    assert await leases[0].ended() is LeaseState.RELEASED
    assert (await waiting).drained
    await router.cancel_drain()


async def test_a_drain_can_be_taken_back_and_the_log_says_who_asked(
    pair: Pair, daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    engine, router = await engine_on(stack, "drain-f", daemon)
    draining = engine.ranks[0].client.draining
    kv, leases = await published(engine, request_id)
    assert (await router.drain()).draining
    await asyncio.wait_for(draining.wait(), TIMEOUT_S)
    left = await router.cancel_drain()
    assert (left.draining, left.leases, left.drained) == (False, 1, False)
    assert (await router.cancel_drain()).draining is False  # idempotent
    assert (await router.ready()).ready
    await pair.decode.gets(request_id, kv, source=engine.source())
    assert await leases[0].ended() is LeaseState.RELEASED
    assert not draining.is_set()  # events come in order
    for event in ("drain begins", "drain cancelled"):
        assert (await logged(daemon, event))[-1]["asked_by"] == f"127.0.0.1 (kvferry/{__version__})"


async def test_a_daemon_that_stops_cannot_be_called_back_and_a_second_signal_stops_it_without_waiting(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("drain-d", 1, "--drain-timeout-s", "60")
    engine, router = await engine_on(stack, "drain-d", daemon)
    await published(engine, request_id)  # a lease that nobody reads
    daemon.signal(signal.SIGTERM)
    await asyncio.wait_for(engine.ranks[0].client.draining.wait(), TIMEOUT_S)
    with refused("stopping", DaemonError, status=409):
        await router.cancel_drain()
    assert await ended(daemon, signal.SIGTERM) == 0
    assert "not drained" in daemon.tail()


async def test_who_waits_for_a_transfer_is_told_that_the_daemon_stops_its_sockets_removed_or_not(
    daemons: Daemons,
) -> None:
    (daemon,) = await daemons.start("drain-h")
    daemon.socket.unlink()
    daemon.socket.with_name(f"{daemon.socket.name}{SUFFIX}").unlink()
    host, _, port = daemon.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /v1/transfers?request_id=never&wait=60 HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    await writer.drain()
    async with RouterClient(daemon.url) as router:
        assert await router.healthy()  # asked later
    daemon.signal(signal.SIGTERM)
    answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503") and b'"code": "draining"' in answer, answer
    assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0
    assert "Traceback" not in daemon.tail()


async def test_a_daemon_that_is_told_to_stop_over_and_over_still_exits_0(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    (daemon,) = await daemons.start("drain-e")
    await engine_on(stack, "drain-e", daemon)
    while daemon.process.poll() is None:
        daemon.signal(signal.SIGTERM)
        await asyncio.sleep(0.001)
    assert daemon.process.returncode == 0, daemon.tail()
    assert '"event": "stopped"' in daemon.log.read_text()


# killed daemons


async def test_the_next_start_cleans_up_after_a_killed_daemon(
    pair: Pair, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("killed")
    engine, _ = await engine_on(stack, "killed", daemon)
    _, leases = await published(engine, request_id)
    assert await ended(daemon, signal.SIGKILL) == -signal.SIGKILL

    client = engine.ranks[0].client
    await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)
    with pytest.raises(KvferryError):
        await leases[0].ended()
    with pytest.raises(KvferryError) as gone:
        await client.publish("later", engine.take(1).tables(), 1)
    assert gone.value.code in ("unreachable", "daemon_gone", "rpc_failed")
    assert daemon.socket.exists()

    (again,) = await daemons.start("killed")
    assert again.socket == daemon.socket
    anew, _ = await engine_on(stack, "killed", again)
    await reads_from(pair.decode, anew, request_id)


async def test_a_reader_of_a_killed_daemon_fails_cleanly_and_its_blocks_become_safe(
    pair: Pair, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("killed-source")
    source, _ = await engine_on(stack, "killed-source", daemon)
    blocks = source.take(50)
    source.write(Kv.random(50), blocks)
    await source.publish(request_id, blocks, 20, more=True)
    reserved = pair.decode.take(50)
    reading = asyncio.create_task(pair.decode.outcomes(request_id, reserved, source=source.source()))

    async def reads() -> bool:
        return any(record.state is TransferState.READING for record in await pair.routers[0].transfers(request_id))

    await until(reads, "all ranks read")
    await ended(daemon, signal.SIGKILL)
    for outcome in await reading:
        assert isinstance(outcome, TransferFailed)
        assert outcome.code in ("peer_unreachable", "peer_lost", "rank_failed", "aborted"), outcome
        await asyncio.wait_for(outcome.quiesced(), TIMEOUT_S)


# two daemons that want the same


@pytest.mark.parametrize("taken", ["rest", "peer", "engine-socket"])
async def test_a_daemon_says_what_it_cannot_have_and_the_other_lives_on(
    daemons: Daemons, pair: Pair, taken: str
) -> None:
    other = pair.decode.daemons[0]
    place = {"rest": other.url.removeprefix("http://"), "peer": other.peer, "engine-socket": str(other.socket)}[taken]
    second = daemons.fleet.daemon(f"second-{taken}", flags=[f"--{taken}", place])
    assert await asyncio.to_thread(second.process.wait, TIMEOUT_S) == 2
    assert place in second.tail()
    assert await pair.routers[0].healthy()
    assert other.socket.exists()
