"""docs/troubleshooting.md, row by row: each symptom is made, and is seen where the page says.

A row is made here, or by a test of another file where it needs a GPU or a vLLM. A row of the page that has neither
fails, and so does a row here that the page has no more.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import test_operator_sees as seen
from fleet import SPOKEN, TIMEOUT_S, ByHand, Daemons, ended, peer_stub, refusal, under_way, until
from hog import hog
from keepers import serving
from lives import TP1, engine_on, published, reads_from
from pair import is_in, waits_for
from ranks import HEADS, Blocks, Shape, TestEngine, describe, start_rank
from slots import gauge
from test_hostile_metadata import Impostor, impostor
from test_met_again import SLOW, engines, moved
from wire import NBYTES, TOKENS, MidRead, TcpPair, cut, tcp_pair

from kvferry.engine import EngineClient, Received, TransferFailed
from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, PeerRequest, SourceBody, TransferState
from kvferry.tables import BlockTable
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.commands import say
from kvferryd.demo.fleet import DaemonService, Fleet
from stopping import stopped

pytestmark = pytest.mark.anyio
TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "troubleshooting.md"
scene, kvferry = seen.scene, seen.kvferry


def rows() -> dict[tuple[str, str], str]:
    """The other cells by (heading, first cell), of all tables of the page, without their heads."""
    found: dict[tuple[str, str], str] = {}
    heading, head = "", ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        if line.startswith("|---"):
            del found[heading, head]
        elif line.startswith("| "):
            head, _, others = line[2:].partition(" | ")
            assert (heading, head) not in found
            found[heading, head] = others
    return found


def commands(text: str) -> set[str]:
    """Commands in a text of the page, with their flags and without values."""
    told = re.findall(r"`kvferry ([a-z]+)((?: --[a-z-]+| [A-Z]+)*)", text)
    return {" ".join([name, *re.findall(r"--[a-z-]+", more)]) for name, more in told}


@dataclass
class Place:
    """Two engines with a daemon each, and more of them for who asks."""

    scene: seen.Scene
    daemons: Daemons
    stack: AsyncExitStack
    request_id: str
    _kvferry: seen.Kvferry
    patch: pytest.MonkeyPatch
    ran: set[str] = field(default_factory=set)
    """Commands, each with and without its flags."""

    async def kvferry(self, *command: str, at: DaemonService | None = None) -> str:
        """What a command prints that asks a daemon: the reader's."""
        self.runs(*command, "--daemon")
        return (await self._kvferry(*command, "--daemon", (at or self.scene.here).url))[1]

    async def alone(self, *command: str) -> str:
        """Words of a command that asks no daemon."""
        self.runs(*command)
        return (await self._kvferry(*command))[1]

    def runs(self, name: str, *arguments: str) -> None:
        self.ran |= {name, *(f"{name} {each}" for each in arguments if each.startswith("--"))}

    async def own(self, *flags: str) -> DaemonService:
        (daemon,) = await self.daemons.start(f"own-{uuid.uuid4().hex[:6]}", 1, *flags)
        return daemon

    async def line(self, command: str, has: str, at: DaemonService | None = None) -> str:
        """The first line of a command that has that, as soon as there is one."""
        found: list[str] = []

        async def there() -> bool:
            found[:] = [line for line in (await self.kvferry(command, at=at)).splitlines() if has in line]
            return bool(found)

        await until(there, f"kvferry {command} shows {has}")
        return found[0]

    async def metric(self, name: str, at: DaemonService) -> float:
        """As soon as /metrics has it above 0."""
        found = [0.0]
        async with httpx.AsyncClient(trust_env=False) as http:

            async def above() -> bool:
                found[:] = [await gauge(http, at, name)]
                return found[0] > 0

            await until(above, f"{name} is above 0")
        return found[0]

    async def fails(self, source: SourceBody, **more: Any) -> str:
        """The line of `kvferry transfers --state failed` for a request that fails, with its error."""
        scene = self.scene
        with pytest.raises(TransferFailed) as failed:
            await scene.reader.receive(self.request_id, scene.reader.take(60), source=source, **more)
        said = await self.kvferry("transfers", "--state", "failed")
        (row,) = [line for line in said.splitlines() if self.request_id in line]
        assert failed.value.code in row
        await failed.value.quiesced()
        return f"{row}\n{failed.value}"


Maker: TypeAlias = Callable[[Place], Awaitable[str]]
"""Makes a symptom; returns what is seen of it."""


# ---- the daemon does not start ----


async def _serve(at: Place, *flags: str, without: tuple[str, ...] = ()) -> str:
    """Lines of a `kvferry serve` that does not start, or only checks. without: modules that are not installed."""
    at.runs("serve", *flags)
    fleet = at.daemons.fleet
    addresses = [f"--rest=127.0.0.1:{fleet.free_port()}", f"--peer=127.0.0.1:{fleet.free_port()}"]
    addresses.append(f"--engine-socket={fleet.directory / 'other.sock'}")
    gone = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    script = f"import sys; {gone}from kvferryd.commands.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "serve", *addresses, *flags]
    ended = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode in ((0,) if "--check" in flags else (1, 2)), ended.stdout
    return ended.stdout


async def no_package(at: Place) -> str:
    return await _serve(at, without=("uvicorn",))


async def no_nixl(at: Place) -> str:
    return await _serve(at, without=("nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"))


async def bad_settings(at: Place) -> str:
    said = await _serve(at, "--way", "sideways", "--arena-mb", "-5")
    assert "sideways" in said
    assert "arena_mb" in said
    checked = await _serve(at, "--way", "direct", "--check")
    assert re.search(r"^way +direct +flag --way$", checked, re.MULTILINE)
    assert re.search(r"^arena_mb +\d+ +default$", checked, re.MULTILINE)
    return said


async def open_to_others(at: Place) -> str:
    return await _serve(at, "--peer", "0.0.0.0:0")


async def port_taken(at: Place) -> str:
    where = at.scene.here
    return await _serve(at, "--peer", where.peer)


async def socket_taken(at: Place) -> str:
    return await _serve(at, "--engine-socket", str(at.scene.here.socket))


# ---- /readyz says no ----


async def no_engine(at: Place) -> str:
    return await at.kvferry("status", at=await at.own())


async def rank_missing(at: Place) -> str:
    daemon = await at.own()
    rank = await start_rank("half", daemon.socket, Shape.tp(2, num_blocks=16), 0, "1")
    at.stack.push_async_callback(rank.client.close)
    return (await at.kvferry("status", at=daemon)).replace("[1]", "")


AWAITS = """import sys
if any(each.startswith("--keeper=") for each in sys.orig_argv):
    import kvferryd.peers.inbound
    kvferryd.peers.inbound.AWAITED_S = 300.0
"""
"""For daemons alone, and not for the processes that they start."""
BREAKS = """import sys
if "serve" in sys.orig_argv:
    import kvferryd.memory
    def close(self):
        raise OSError("the context is broken")
    kvferryd.memory.Region.close = close
"""


def _begin_with(at: Place, code: str) -> None:
    """Daemons of this test run it before anything else."""
    site = at.daemons.fleet.directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    at.patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


async def peer_not_back(at: Place) -> str:
    """It stands still while another daemon takes over, which would be ready in 3 s all the same."""
    fleet = at.daemons.fleet
    _begin_with(at, AWAITS)
    source, reader = await asyncio.to_thread(at.stack.enter_context, engines(fleet, at.request_id, *SLOW))
    await asyncio.to_thread(moved, source, reader, at.request_id)
    silent = serving(source.daemon)
    os.kill(silent, signal.SIGSTOP)
    at.stack.callback(os.kill, silent, signal.SIGCONT)
    os.kill(serving(reader.daemon), signal.SIGKILL)
    return await at.line("status", "are not back yet", at=reader.daemon)


async def draining(at: Place) -> str:
    daemon = await at.own()
    await engine_on(at.stack, "drains", daemon)
    await at.kvferry("drain", at=daemon)
    return await at.kvferry("status", at=daemon)


async def no_rdma(at: Place) -> str:
    return await at.kvferry("status", at=await at.own("--require-rdma"))


# ---- the engine cannot attach ----


async def _attaches(daemon: Path, timeout_s: float) -> str:
    """The code with which it is refused."""
    with pytest.raises(KvferryError) as refused:
        await EngineClient.connect(str(daemon), engine_id="seen-reader", epoch="2", timeout_s=timeout_s)
    return refused.value.code


async def nobody_there(at: Place) -> str:
    return await _attaches(at.daemons.fleet.directory / "none.sock", 0.5)


async def attached_twice(at: Place) -> str:
    return await _attaches(at.scene.here.socket, TIMEOUT_S)


async def same_epoch(at: Place) -> str:
    daemon = await at.own()
    first = await TestEngine.start("again", [daemon], TP1, epoch="once")
    await first.close()
    with pytest.raises(KvferryError) as refused:
        await TestEngine.start("again", [daemon], TP1, epoch="once")
    return refused.value.code


async def no_room_for_it(at: Place) -> str:
    codes, daemon = [], await at.own()
    for number, change in enumerate((_with(offset=1 << 30), _with(offset=0), _larger)):
        async with AsyncExitStack() as own:
            with pytest.raises(KvferryError) as refused:
                await _described(replace(at, stack=own), f"beyond-{number}", change, daemon=daemon)
        codes.append(str(refused.value.code))
        assert re.search(r"\b\d+\.\w+|region", refused.value.message), "the message names the component"
    return " ".join(codes)


def _larger(said: Manifest) -> Manifest:
    """Than what was allocated."""
    return said.model_copy(
        update={"regions": tuple(each.model_copy(update={"nbytes": 1 << 40}) for each in said.regions)}
    )


# ---- a transfer does not begin ----


async def reserved(at: Place) -> str:
    reader = at.scene.reader
    async with under_way(reader.receive(at.request_id, reader.take(50))):
        return await at.line("transfers", at.request_id)


async def ordered(at: Place) -> str:
    await at.scene.router.order(OrderBody(request_id=at.request_id, source=at.scene.source.source()))
    said = await at.line("transfers", at.request_id)
    await at.scene.router.abort_request(at.request_id)
    return said


async def connecting(at: Place) -> str:
    reader, source = at.scene.reader, at.scene.source
    async with under_way(reader.receive(at.request_id, reader.take(50), source=source.source())):
        assert at.request_id not in await at.kvferry("leases", at=at.scene.there), "it has not published yet"
        return await at.line("transfers", "connecting")


async def _orders(at: Place, router: RouterClient, **change: object) -> str:
    body = {"request_id": at.request_id, "source": at.scene.source.source()} | change
    with pytest.raises(KvferryError) as refused:
        await router.order(OrderBody.model_validate(body))
    return f"{refused.value.code} {refused.value}"


async def unknown_engine(at: Place) -> str:
    return await _orders(at, at.scene.router, destination={"engine_id": "nobody", "tables": {}})


async def order_conflict(at: Place) -> str:
    order = OrderBody(request_id=at.request_id, source=at.scene.source.source(), order_id=uuid.uuid4().hex)
    await at.scene.router.order(order)
    said = await _orders(at, at.scene.router, request_id=f"{at.request_id}-other", order_id=order.order_id)
    await at.scene.router.abort_request(at.request_id)
    return said


async def own_engine(at: Place) -> str:
    return await _orders(at, at.scene.router, source=at.scene.reader.source())


async def address_not_allowed(at: Place) -> str:
    return await _orders(at, at.scene.router, source=SourceBody(engine_id="far", address="192.0.2.1:7411"))


async def full(at: Place) -> str:
    _, router = await engine_on(at.stack, "small", await at.own("--max-transfers", "1"))
    await router.order(OrderBody(request_id=f"{at.request_id}-first", source=at.scene.source.source()))
    return await _orders(at, router)


# ---- a transfer fails ----


Change: TypeAlias = Callable[[Manifest], Manifest]


async def _described(
    at: Place, engine_id: str, change: Change = lambda said: said, shape: Shape = TP1,
    daemon: DaemonService | None = None,
) -> tuple[EngineClient, SourceBody]:  # fmt: skip
    """An engine with a daemon of its own, unless one is named, which describes its cache so."""
    daemon, epoch = daemon or await at.own(), uuid.uuid4().hex
    client = await EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=epoch, timeout_s=TIMEOUT_S)
    at.stack.push_async_callback(client.close)
    region = await client.allocate(shape.nbytes(0))
    await client.register(change(describe(engine_id, epoch, shape, 0, region)))
    return client, SourceBody(engine_id=engine_id, address=daemon.peer)


def _with(**change: object) -> Change:
    """In every component."""
    return lambda said: said.model_copy(
        update={"components": tuple(each.model_copy(update=change) for each in said.components)}
    )


OPAQUE = _with(encoding="opaque:test")
ONE_BLOCK = {"full": BlockTable.of([0]), "state": BlockTable.of([])}


async def nobody_listens(at: Place) -> str:
    said = await at.fails(SourceBody(engine_id="nobody", address="127.0.0.1:9"))
    assert "127.0.0.1:9" in await at.kvferry("peers")
    return said


async def no_such_name(at: Place) -> str:
    hosts = "no-such-host.invalid", "255.255.255.255"  # the kernel has no way to the second, on any machine
    reader, _ = await engine_on(at.stack, "asks", await at.own("--allow-peers", ",".join(hosts)))
    said = []
    for host in hosts:
        source = SourceBody(engine_id="nameless", address=f"{host}:7411")
        with pytest.raises(TransferFailed) as failed:
            await reader.receive(f"{at.request_id}-{host}", reader.take(50), source=source, deadline_s=TIMEOUT_S)
        said.append(str(failed.value))
    return "\n".join(said)


async def silent(at: Place) -> str:
    still = await at.own()
    with stopped(still.process.pid):
        said = await at.fails(SourceBody(engine_id="still", address=still.peer), deadline_s=TIMEOUT_S)
    assert "at " + still.url in await at.kvferry("status", at=still)
    return said


async def _dead(at: Place, engine_id: str) -> tuple[Impostor, SourceBody]:
    """An impostor for an engine whose daemon is dead, and its address."""
    daemon = await at.own("--way", "direct")
    await engine_on(at.stack, engine_id, daemon)
    async with peer_stub(daemon) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=engine_id))
    await ended(daemon, signal.SIGKILL)
    service, address = await at.stack.enter_async_context(impostor(said))
    service.moves_to(address)
    return service, SourceBody(engine_id=engine_id, address=address)


async def no_fabric(at: Place) -> str:
    _, source = await _dead(at, "apart")
    said = await at.fails(source)
    assert source.address in await at.kvferry("peers")
    assert f"{source.address} answers and cannot be read" in await at.kvferry("status")
    assert "UCX opens " in await at.alone("doctor")
    return said


async def no_metadata(at: Place) -> str:
    service, source = await _dead(at, "garbled")
    service.metadata = b"nixlSerDes|"
    return await at.fails(source)


async def unproven(at: Place) -> str:
    secret = at.daemons.fleet.directory / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    daemon = await at.own("--peer-secret-file", str(secret))
    said = await at.fails(SourceBody(engine_id="guarded", address=daemon.peer))
    assert daemon.peer in await at.kvferry("peers")
    for flags in ((), ("--peer-secret-file", str(secret))):  # on both sides
        assert f"peer_secret_file   {secret if flags else '-'} " in await _serve(at, "--check", *flags)
    return said


async def rank_refuses(at: Place) -> str:
    daemons = await at.daemons.start("both", 2)
    reader = await TestEngine.start("both", daemons, Shape.tp(2, num_blocks=16))
    at.stack.push_async_callback(reader.close)
    said: dict[str, Any] = {"attempt": reader.next_attempt(), "source": at.scene.source.source()}
    first, second = (rank.client for rank in reader.ranks)
    with pytest.raises(KvferryError):
        await second.receive(at.request_id, Blocks((1 << 20,), 1).tables(), **said)
    with pytest.raises(TransferFailed) as failed:
        await first.receive(at.request_id, reader.take(50).tables(), **said)
    async with RouterClient(daemons[0].url) as router:
        (record,) = await router.transfers(at.request_id, wait_s=TIMEOUT_S)
    assert [share.error.code for share in record.ranks if share.error and share.rank == 1] == ["block_id_out_of_range"]
    return failed.value.code


async def a_part_of_a_block(at: Place) -> str:
    publisher, source = await _described(at, "opaque", OPAQUE)
    reader, _ = await _described(at, "opaque-too", OPAQUE)
    await publisher.publish(at.request_id, ONE_BLOCK, 16)
    with pytest.raises(KvferryError) as refused:
        await reader.receive(at.request_id, ONE_BLOCK, (0, 7), source=source)
    return refused.value.code


async def rank_dies(at: Place) -> str:
    daemons = await at.daemons.start("lost", 2)
    reader = await TestEngine.start("lost", daemons, Shape.tp(2, num_blocks=16))
    at.stack.push_async_callback(reader.close)
    await published(at.scene.source, at.request_id)
    async with RouterClient(daemons[0].url) as router:
        await router.prewarm(PeerRequest(engine_id="seen-source", address=at.scene.there.peer))
        await router.order(OrderBody(request_id=at.request_id, source=at.scene.source.source(), deadline_ms=5000))
        await reader.ranks[0].client.receive(at.request_id, reader.take(50).tables(), attempt=reader.next_attempt())
        daemons[1].process.kill()
        (record,) = await router.transfers(at.request_id, wait_s=TIMEOUT_S)
    return await at.kvferry("transfers", "--state", "failed", at=daemons[0]) + str(record.error)


async def prefilled_anew(at: Place) -> str:
    """Between the reads of two ranks."""
    daemons = await at.daemons.start("both", 2)
    reader = await TestEngine.start("both", daemons, Shape.tp(2, num_blocks=16))
    at.stack.push_async_callback(reader.close)
    source = at.scene.source
    said: dict[str, Any] = {"attempt": reader.next_attempt(), "source": source.source()}
    tables = reader.take(50).tables()
    first, second = (rank.client for rank in reader.ranks)
    await published(source, at.request_id)
    await first.receive(at.request_id, tables, **said)
    await source.ranks[0].client.abort(at.request_id)
    await published(source, at.request_id)
    with pytest.raises(TransferFailed) as failed:
        await second.receive(at.request_id, tables, **said)
    return str(failed.value) + await at.kvferry("transfers", "--state", "failed", at=daemons[0])


@asynccontextmanager
async def _mid_read(at: Place) -> AsyncIterator[tuple[TcpPair, MidRead[list[Received]]]]:
    """A read over TCP whose source stands still."""
    pair = await at.stack.enter_async_context(tcp_pair(at.daemons, f"tcp-{uuid.uuid4().hex[:6]}"))
    reserved = pair.reader.take(TOKENS)

    def receive(request_id: str) -> Coroutine[Any, Any, list[Received]]:
        return pair.reader.receive(request_id, reserved, source=pair.source.source())

    async with pair.stopped_in_mid_read(at.request_id, receive) as read:
        yield pair, read


async def connection_breaks(at: Place) -> str:
    """Between two parts of a publish. Both daemons live, and reach each other."""
    async with tcp_pair(at.daemons, f"tcp-{uuid.uuid4().hex[:6]}") as pair:
        _, blocks = pair.source.filled(TOKENS)
        await pair.source.publish(at.request_id, blocks, TOKENS // 2, more=True)
        async with under_way(pair.reader.receive(at.request_id, pair.reader.take(TOKENS), source=pair.source.source())):
            await until(lambda: is_in(pair.reader_router, at.request_id, TransferState.READING), "it is read")
            publish = partial(waits_for, pair.reader_router, at.request_id, Awaited.PUBLISH)
            await until(publish, "the first part has been read")
            cut(pair.source_daemon)
            await pair.source.publish(at.request_id, blocks, TOKENS)
            said = await at.line("transfers", "failed", at=pair.reader_daemon)
            assert "peer_lost: the connection to " in said
            return said


def _by_hand(stub: peer_pb2_grpc.PeerAsyncStub, engine_id: str, epoch: str, **change: Any) -> ByHand:
    reader = peer_pb2.Reader(engine_id="by hand", epoch="1", rank=0, world_size=1)
    return ByHand(stub, peer_pb2.ReadOpening(engine_id=engine_id, epoch=epoch, reader=reader, **change))


async def lease_does_not_hold(at: Place) -> str:
    """Its word is gone from the source's memory before the last of it is read, and nothing has told of its end."""
    source, daemon = at.scene.source, at.scene.there
    _, blocks = source.filled(50)
    await source.publish(at.request_id, blocks, 20, more=True)
    failing = asyncio.create_task(at.fails(source.source()))
    await until(lambda: is_in(at.scene.router, at.request_id, TransferState.READING), "it is read")
    async with peer_stub(daemon) as stub:
        told = (await _by_hand(stub, source.engine_id, source.epoch).open(at.request_id)).update
        memory = os.open(f"/proc/{daemon.process.pid}/mem", os.O_RDWR)
        os.pwrite(memory, bytes(8), told.word_address)
        os.close(memory)
        await source.publish(at.request_id, blocks, 50)
        return await failing


async def lease_over_or_torn(at: Place) -> str:
    return await lease_over(at) + await lease_does_not_hold(replace(at, request_id=f"{at.request_id}-torn"))


async def an_earlier_attempt(at: Place) -> str:
    (rank,), source = at.scene.reader.ranks, at.scene.source.source()
    blocks = at.scene.reader.take(50).tables()
    ordered = await at.scene.router.order(OrderBody(request_id=at.request_id, source=source, attempt=1))
    with pytest.raises(TransferFailed):
        await rank.client.receive(at.request_id, blocks, source=source, attempt=1 << 20, deadline_s=0.3)
    superseded = await at.scene.router.wait(ordered.transfer_id, timeout_s=TIMEOUT_S)
    await rank.client.quiesced(at.request_id)
    with pytest.raises(KvferryError) as refused:
        await rank.client.receive(at.request_id, blocks, source=source, attempt=1)
    return f"{superseded.error} {refused.value.code}"


async def other_weights(at: Place) -> str:
    source, router = await engine_on(at.stack, "trained", await at.own())
    _, blocks = source.filled(50)
    await source.publish(at.request_id, blocks, 20, more=True)
    failing = asyncio.create_task(at.fails(source.source()))
    await until(lambda: is_in(at.scene.router, at.request_id, TransferState.READING), "it is read")
    await source.ranks[0].client.replace_weights("B")
    with pytest.raises(KvferryError) as mixed:
        await source.publish(at.request_id, blocks, 50)
    await failing
    (engine,) = await router.engines()
    assert engine.weights == "B"
    again = replace(at, request_id=f"{at.request_id}-b")
    await published(source, again.request_id)
    return f"{mixed.value.code} {await again.fails(source.source())}"


async def rest_port(at: Place) -> str:
    address = at.scene.there.url.removeprefix("http://")
    said = await at.fails(SourceBody(engine_id="seen-source", address=address))
    assert "is no kvferry peer port" in await at.kvferry("peers")
    return said


async def unpublished(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    return await at.fails(at.scene.source.source(), tokens=(0, 60))


async def other_prompt(at: Place) -> str:
    _, blocks = at.scene.source.filled(50)
    await at.scene.source.publish(at.request_id, blocks, 50, digest=b"a" * 32)
    return await at.fails(at.scene.source.source(), digest=b"b" * 32)


async def late(at: Place) -> str:
    return await at.fails(at.scene.source.source(), deadline_s=0.5)


async def lease_over(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    await at.scene.source_router.revoke_lease(at.request_id)
    return await at.fails(at.scene.source.source())


async def other_epoch(at: Place) -> str:
    stale = await at.fails(at.scene.source.source(epoch="another"))
    first = await TestEngine.start("twice", [await at.own()], TP1, epoch="1")
    at.stack.push_async_callback(first.close)
    second = await TestEngine.start("twice", [await at.own()], TP1, epoch="1")
    at.stack.push_async_callback(second.close)
    await reads_from(at.scene.reader, first, f"{at.request_id}-first")
    taken = await replace(at, request_id=f"{at.request_id}-taken").fails(second.source())
    await at.kvferry("peers", "--forget", "twice")
    await reads_from(at.scene.reader, second, f"{at.request_id}-second")
    async with peer_stub(second.daemons[0]) as stub:  # a reader that shakes hands anew is not told so
        late = _by_hand(stub, "twice", "1", agent_name="kvferry-0123456789abcdef")
        await late.introduce()
        return f"{stale} {taken} {(await refusal(late.call.read())).code}"


async def impossible_way(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    unavailable = await at.fails(at.scene.source.source(), way="mapped")
    assert "mapped cannot be had: " in await at.kvferry("peers")
    strict, _ = await engine_on(at.stack, "strict", await at.own("--strict", "--arena-mb", "4", "--ucx", "TLS=all"))
    reader, _ = await engine_on(at.stack, "direct", await at.own("--way", "direct"))
    await published(strict, at.request_id)
    with pytest.raises(TransferFailed) as failed:
        await reader.receive(at.request_id, reader.take(50), source=strict.source())
    return f"{unavailable} {failed.value.code}"


Edit: TypeAlias = Callable[[Any], object]
"""Changes a manifest, as JSON has it."""


async def _explained(at: Place, *sources: Edit, here: Edit = lambda said: None) -> str:
    """Words of `kvferry explain` on the reader's manifest, and of one for each rank of a source."""
    files = [at.daemons.fleet.directory / f"manifest-{number}.json" for number in range(len(sources) + 1)]
    for file, edit in zip(files, (here, *sources), strict=True):
        said = at.scene.reader.ranks[0].manifest.model_dump(mode="json")
        edit(said)
        file.write_text(json.dumps(said))
    there = [argument for file in files[1:] for argument in ("--source", str(file))]
    return await at.alone("explain", *there, "--destination", str(files[0]))


def _components(**change: object) -> Edit:
    return lambda said: [each.update(change) for each in said["components"]]


def _smaller(said: Any) -> None:
    for component in said["components"]:
        component["axes"][-1]["extent"] -= 1


def _paged_state(said: Any) -> None:
    """The states alone, in the group of what is paged."""
    (state,) = said["components"] = said["components"][-1:]
    slot = {"name": "slot", "extent": said["groups"][0]["block_size"], "stride": state["axes"][0]["stride"]}
    state["axes"][0]["stride"] *= slot["extent"]
    state |= {"group": "full", "offset": 0, "axes": [state["axes"][0], slot, *state["axes"][1:]]}


def _dealt(rank: int, interleave: int) -> Edit:
    """A rank beside another one, with which it shares the tokens out."""
    shard = {"rank": rank, "size": 2, "interleave": interleave}
    return lambda said: (said.update(rank=rank, world_size=2), said["groups"][0].update(token_shard=shard))


async def unlike(at: Place) -> str:
    daemon = await at.own()
    source = await TestEngine.start("unlike", [daemon], TP1, fingerprint="another")
    at.stack.push_async_callback(source.close)
    said = await at.fails(source.source())
    assert "fingerprint" in await at.kvferry("explain", "--transfer", at.request_id)
    async with httpx.AsyncClient(base_url=at.scene.here.url, trust_env=False) as http:
        again = await http.post("/v1/peers", json=source.source().model_dump(include={"engine_id", "address"}))
    assert (again.status_code, again.json()["refusals"][0]["code"]) == (422, "fingerprint")
    more = [
        await _explained(at, lambda said: [each["shard"].update(total=2 * HEADS) for each in said["components"]]),
        await _explained(at, _smaller),
        await _explained(at, lambda said: said["components"].pop(0)),
    ]
    return "\n".join([said, again.text, *more])


async def _refused(at: Place, source: SourceBody) -> str:
    said = await at.fails(source)
    told = await at.kvferry("explain", "--transfer", at.request_id)
    (code,) = {each for each in REFUSALS if f"{each}:" in said}
    assert code in told
    return code


async def _refused_by(at: Place, reader: EngineClient, here: SourceBody, source: SourceBody) -> str:
    """The same of another reader. here: where that is."""
    with pytest.raises(TransferFailed) as failed:
        await reader.receive(at.request_id, ONE_BLOCK, (0, 16), source=source)
    (code,) = {each for each in REFUSALS if f"{each}:" in str(failed.value)}
    return code


async def other_encoding(at: Place) -> str:
    encoding = await _refused(at, (await _described(at, "unlike", _with(encoding="fp16")))[1])
    return encoding + await _explained(
        at, _components(encoding=None, dtype="float16"), here=_components(encoding=None, dtype="bfloat16")
    )


async def blocks_of_opaque_bytes(at: Place) -> str:
    _, source = await _described(at, "large", OPAQUE, Shape(block_size=32, num_blocks=8))
    return await _refused_by(at, *await _described(at, "small", OPAQUE), source)


async def other_axes(at: Place) -> str:
    def turned(said: Manifest) -> Manifest:
        renamed = {"dim": "width"}
        axes = {
            each: tuple(axis.model_copy(update={"name": renamed.get(axis.name, axis.name)}) for axis in each.axes)
            for each in said.components
        }
        parts = tuple(each.model_copy(update={"axes": axes[each]}) for each in said.components)
        return said.model_copy(update={"components": parts})

    axes = await _refused(at, (await _described(at, "unlike", turned))[1])
    kind = await _explained(at, _paged_state, here=lambda said: said.update(components=said["components"][-1:]))
    return "\n".join([axes, kind, await _explained(at, _dealt(0, 16), _dealt(1, 32))])


async def half_of_the_heads(at: Place) -> str:
    source = await TestEngine.start("half", [await at.own()], Shape(((0, HEADS // 2),), num_blocks=16))
    at.stack.push_async_callback(source.close)
    return await _refused(at, source.source())


# ---- and what is left ----


async def no_transfers(at: Place) -> str:
    _, router = await engine_on(at.stack, "asks-none", daemon := await at.own())
    assert not await router.transfers()
    return await at.kvferry("transfers", at=daemon)


async def not_quiet(at: Place) -> str:
    async with _mid_read(at) as (pair, read):
        await pair.reader_router.abort_request(read.request_id)
        with pytest.raises(TransferFailed):
            await read.receiving
        assert await at.metric("kvferry_quarantined_bytes", pair.reader_daemon) >= NBYTES
        said = await at.kvferry("status", at=pair.reader_daemon)
        assert f"{say.size(NBYTES)} in quarantine" in said
    return said


async def not_freed(at: Place) -> str:
    _begin_with(at, BREAKS)
    daemon = await at.own()
    engine, router = await engine_on(at.stack, "broken", daemon)
    await engine.close()
    said = f"kvferry_unfreed_bytes {await at.metric('kvferry_unfreed_bytes', daemon)}"
    nbytes = engine.ranks[0].region.nbytes
    (warning,) = (await router.ready()).warnings
    assert "engine broken: " in warning and "the context is broken" in warning
    status = await at.kvferry("status", at=daemon)
    assert warning in status and f"{say.size(nbytes)} not given back" in status
    assert '"step": "free region 0"' in daemon.log.read_text()
    await engine_on(at.stack, "another", daemon)
    return said


async def unread(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    said = await at.line("leases", at.request_id, at=at.scene.there)
    await at.scene.source_router.revoke_lease(at.request_id)
    return said + await at.kvferry("status", at=at.scene.there)


@dataclass(frozen=True)
class By:
    """The symptom is made by these tests. file: below tests/. needs: what their machine has to have."""

    file: str
    tests: tuple[str, ...]
    needs: str


REFUSALS = ("encoding", "dtype", "uncovered", "divided", "axes", "group_kind")
START, READY, ATTACH = "The daemon does not start", "/readyz says no", "The engine cannot attach"
BEGIN, FAILS, REFUSED = "A transfer does not begin", "A transfer fails", "A pair is refused"
NOTHING, MEMORY = "A request is answered, and nothing was moved", "Memory is not given back"
MADE: dict[tuple[str, str], Maker | By] = {
    (START, "`needs the package ..., which is not installed`"): no_package,
    (START, "`NIXL is not installed`"): no_nixl,
    (START, "`settings are wrong`, with one line for each"): bad_settings,
    (START, "`peer ... is open to other hosts`"): open_to_others,
    (START, "`nothing can listen on`"): port_taken,
    (START, "`another daemon serves this engine socket`"): socket_taken,
    (READY, "`no engine has registered its cache`"): no_engine,
    (READY, "`the daemons of ranks [...] have not joined`"): rank_missing,
    (READY, "`... peers of the daemon before are not back yet`"): peer_not_back,
    (READY, "`draining`"): draining,
    (READY, "`require_rdma is set and ...`"): no_rdma,
    (ATTACH, "`unreachable`"): nobody_there,
    (ATTACH, "`epoch_reused`"): same_epoch,
    (ATTACH, "`engine_attached`"): attached_twice,
    (ATTACH, "`region_mismatch`, `out_of_region`, `overlapping_components`"): no_room_for_it,
    (ATTACH, "`wrong_gpu`, `unknown_gpu`"): By(
        "gpu/test_memory.py",
        ("test_what_is_not_inside_the_engines_allocation_is_not_adopted", "test_errors_carry_the_drivers_own_name"),
        "a GPU",
    ),
    (BEGIN, "`waiting`, and the engine has reserved"): reserved,
    (BEGIN, "`waiting`, and the order has come"): ordered,
    (BEGIN, "`connecting` for long"): connecting,
    (BEGIN, "the order is answered 404 `unknown_engine`"): unknown_engine,
    (BEGIN, "409 `order_conflict`"): order_conflict,
    (BEGIN, "422 `own_engine`"): own_engine,
    (BEGIN, "403 `address_not_allowed`"): address_not_allowed,
    (BEGIN, "429 `full`"): full,
    (FAILS, "`peer_unreachable`"): nobody_listens,
    (FAILS, "... `nobody listens at`"): nobody_listens,
    (FAILS, "... `there is no way to`, `nobody knows the name in`"): no_such_name,
    (FAILS, "... `has not answered for ... s`"): silent,
    (FAILS, "... `answers, and NIXL does not connect to its memory`"): no_fabric,
    (FAILS, "... `is no kvferry peer port`"): rest_port,
    (FAILS, "`proof_failed`"): unproven,
    (FAILS, "`rank_lost`"): rank_dies,
    (FAILS, "`rank_failed`"): rank_refuses,
    (FAILS, "`lease_changed`"): prefilled_anew,
    (FAILS, "`superseded`, `stale_attempt`"): an_earlier_attempt,
    (FAILS, "`peer_lost`"): connection_breaks,
    (FAILS, "`lease_ended`, `torn`"): lease_over_or_torn,
    (FAILS, "`tokens_unpublished`"): unpublished,
    (FAILS, "`other_prompt`"): other_prompt,
    (FAILS, "`other_weights`, `mixed_weights`"): other_weights,
    (FAILS, "`refused`, with `refusals`"): unlike,
    (FAILS, "`divided`"): a_part_of_a_block,
    (FAILS, "`stale_epoch`, `stale_instance`, `engine_taken`"): other_epoch,
    (FAILS, "`deadline`"): late,
    (FAILS, "`way_unavailable`, `cannot_stage`"): impossible_way,
    (FAILS, "`malformed_metadata`"): no_metadata,
    (REFUSED, "`fingerprint`, `total`, `inner_extent`, `missing_component`"): unlike,
    (REFUSED, "`encoding`, `dtype`"): other_encoding,
    (REFUSED, "`divided`"): blocks_of_opaque_bytes,
    (REFUSED, "`uncovered`"): half_of_the_heads,
    (REFUSED, "`axes`, `group_kind`, `token_shard`"): other_axes,
    (NOTHING, "`vllm:kvferry_missed_handovers_total` rises"): By(
        "engines/test_vllm_lives.py",
        ("test_params_that_mean_nothing_are_prefilled_here", "test_kv_that_has_expired_is_computed_again"),
        "a real vLLM",
    ),
    (NOTHING, "it does not, and decode's daemon lists no transfers"): no_transfers,
    (MEMORY, "blocks stay reserved after a failure"): not_quiet,
    (MEMORY, "`kvferry_unfreed_bytes` is above 0"): not_freed,
    (MEMORY, "prefill's blocks are not freed"): unread,
    (MEMORY, "GPU memory of a dead source stays taken"): By(
        "gpu/test_leaks.py",
        ("test_a_direct_reader_keeps_the_memory_of_a_killed_daemon", "test_a_killed_daemon_of_the_source"),
        "a GPU",
    ),
}


# ---- the steps of "A transfer is slow" ----


async def a_late_publish(at: Place) -> str:
    """The answer of `explain`: the wait, how long, and what helps."""
    reader, source = at.scene.reader, at.scene.source
    await at.scene.moved(f"{at.request_id}-first")
    _, blocks = source.filled(50)
    receiving = asyncio.create_task(reader.receive(at.request_id, reader.take(50), source=source.source()))
    await until(
        lambda: waits_for(at.scene.router, at.request_id, Awaited.PUBLISH), "the source says that nothing is published"
    )
    await source.publish(at.request_id, blocks, 50)
    await receiving
    said = await at.kvferry("explain", "--transfer", at.request_id)
    assert "publish" in said
    assert all(phase in said for phase in ("waiting", "connecting", "reading"))
    assert "moving" in await at.kvferry("peers")
    return said


async def a_late_order(at: Place) -> str:
    reader, source = at.scene.reader, at.scene.source
    await published(source, at.request_id)
    receiving = asyncio.create_task(reader.receive(at.request_id, reader.take(50)))
    await at.line("transfers", "waiting")
    await at.scene.router.order(OrderBody(request_id=at.request_id, source=source.source()))
    await receiving
    return await at.kvferry("explain", "--transfer", at.request_id)


async def a_first_meeting(at: Place) -> str:
    source, _ = await engine_on(at.stack, "met", await at.own())
    await published(source, at.request_id)
    await at.scene.reader.receive(at.request_id, at.scene.reader.take(50), source=source.source())

    async def met() -> list[str]:
        lines = at.scene.here.log.read_text().splitlines()
        return [line for line in lines if "peer met" in line and '"engine_id": "met"' in line]

    await until(met, "a thread has written of the handshake")
    (line,) = await met()
    (record,) = await at.scene.router.transfers(at.request_id)
    (shaken,) = [each for each in record.ranks[0].waits if each.what is Awaited.HANDSHAKE]
    assert shaken.on == source.daemons[0].peer and shaken.part in json.loads(line)["took_ms"]
    assert all(step in line for step in ("asking", "screening", "planning", "loading"))
    return line


async def only_direct(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    await at.scene.reader.receive(at.request_id, at.scene.reader.take(50), source=at.scene.source.source())
    (record,) = await at.scene.router.transfers(at.request_id)
    assert record.path == "direct" and record.descriptors > 1
    return await at.kvferry("peers")


async def no_slots(at: Place) -> str:
    flags = "--way", "staged", "--arena-mb", "1"
    (source, _), (reader, _) = [await engine_on(at.stack, name, await at.own(*flags)) for name in ("packs", "waits")]
    greedy = await at.stack.enter_async_context(hog(source, reader.ranks[0].manifest, f"{at.request_id}-hog", 100))
    async with greedy.holding():
        await published(source, at.request_id)
        async with under_way(reader.receive(at.request_id, reader.take(50), source=source.source())):
            return f"{await at.metric('kvferry_queue_depth', source.daemons[0])} wait"


STEPS: dict[str, tuple[Maker, str]] = {
    "`kvferry explain --transfer REQUEST`": (a_late_publish, "waited .* to publish"),
    "`waiting` is long": (a_late_order, "waited .* for the router's order"),
    "`connecting` is long the first time": (a_first_meeting, "peer met"),
    "`reading` is long and the path is `direct`": (only_direct, "seen-source: mapped cannot be had: "),
    "`reading` is long and the rate is that of TCP": (no_rdma, "require_rdma is set and "),
    "`kvferry_queue_depth` stays above 0": (no_slots, r"[1-9]\S* wait"),
}
"""The beginning of each: what is seen of it."""


def test_every_row_of_the_page_is_made_somewhere() -> None:
    assert len(rows()) > 50
    assert sorted(rows()) == sorted(MADE)


def test_every_step_of_a_slow_transfer_is_walked() -> None:
    (_, slow) = PAGE.read_text().split("## A transfer is slow")
    steps = re.findall(r"^\d\. (.*)$", slow.partition("\n## ")[0], re.MULTILINE)
    assert len(steps) == len(STEPS)
    assert all(step.startswith(begins) for step, begins in zip(steps, STEPS, strict=True))


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_shows_what_it_says(place: Place, step: str) -> None:
    maker, shows = STEPS[step]
    said = await maker(place)
    assert re.search(shows, said), said


ELSEWHERE = {row: made for row, made in MADE.items() if isinstance(made, By)}
HERE = {row: made for row, made in MADE.items() if not isinstance(made, By)}


def _ids(made: dict[tuple[str, str], object]) -> list[str]:
    return [f"{heading}: {cell}".replace("`", "") for heading, cell in made]


@pytest.mark.parametrize("made", ELSEWHERE.values(), ids=_ids(ELSEWHERE))
def test_a_row_that_is_made_elsewhere_names_its_tests(made: By) -> None:
    assert made.needs in ("a GPU", "a real vLLM"), "this machine has the rest"
    code = (TESTS / made.file).read_text()
    assert {*made.tests} <= {*re.findall(r"^(?:async )?def (\w+)", code, re.MULTILINE)}
    pytest.skip(f"tests/{made.file} makes it, which needs {made.needs}")


@pytest.fixture
def place(
    scene: seen.Scene, own_fleet: Fleet, stack: AsyncExitStack, request_id: str, kvferry: seen.Kvferry,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:  # fmt: skip
    return Place(scene, Daemons(own_fleet), stack, f"{uuid.uuid4().hex[:8]}-{request_id}"[:60], kvferry, monkeypatch)


@pytest.mark.parametrize("row", HERE, ids=_ids(HERE))
async def test_the_symptom_is_seen_where_the_page_says(place: Place, row: tuple[str, str]) -> None:
    """Each of them, where a row names several, and by the commands that the row names."""
    said = re.sub(r"\s+", " ", await HERE[row](place))
    words = re.findall(r"`([^`]+)`", row[1].replace("[...]", "..."))
    missing = [each for each in words if not all(part.strip() in said for part in each.split("..."))]
    assert not missing, said
    assert commands(rows()[row]) <= place.ran
