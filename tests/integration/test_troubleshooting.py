"""docs/troubleshooting.md, row by row: each symptom is made, and is seen where the page says.

A row is made here, or by a test of another file, which may need a GPU or an engine. A row of the page that has neither
fails, and so does a row here that the page has no more.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import test_operator_sees as seen
from fleet import TIMEOUT_S, Daemons, under_way, until
from lives import TP1, engine_on, published
from pair import waits_for
from ranks import HEADS, Blocks, Shape, TestEngine, describe, start_rank

from kvferry.engine import EngineClient, TransferFailed
from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, SourceBody
from kvferry.tables import BlockTable
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "troubleshooting.md"
scene, kvferry = seen.scene, seen.kvferry


def rows() -> list[tuple[str, str]]:
    """(heading, first cell) of all tables of the page, without their heads."""
    found: list[tuple[str, str]] = []
    heading, head = "", ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        if line.startswith("|---"):
            found.remove((heading, head))
        elif line.startswith("| "):
            head = line[2:].split(" | ")[0]
            found.append((heading, head))
    return found


@dataclass
class Place:
    """Two engines with a daemon each, and more of them for who asks."""

    scene: seen.Scene
    daemons: Daemons
    stack: AsyncExitStack
    request_id: str
    _kvferry: seen.Kvferry

    async def kvferry(self, *command: str, at: DaemonService | None = None) -> str:
        """What a command prints that asks a daemon: the reader's."""
        return (await self._kvferry(*command, "--daemon", (at or self.scene.here).url))[1]

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

    async def fails(self, source: SourceBody, **more: Any) -> str:
        """The line of `kvferry transfers --state failed` for a request that fails, with its error."""
        scene = self.scene
        with pytest.raises(TransferFailed) as failed:
            await scene.reader.receive(self.request_id, scene.reader.take(60), source=source, **more)
        said = await self.kvferry("transfers", "--state", "failed")
        (row,) = [line for line in said.splitlines() if self.request_id in line]
        assert failed.value.code in row
        return f"{row}\n{failed.value}"


Maker: TypeAlias = Callable[[Place], Awaitable[str]]
"""Makes a symptom; returns what is seen of it."""


# ---- the daemon does not start ----


async def _serve(at: Place, *flags: str, without: tuple[str, ...] = ()) -> str:
    """What `kvferry serve` says that does not start. without: modules that are not installed."""
    fleet = at.daemons.fleet
    addresses = [f"--rest=127.0.0.1:{fleet.free_port()}", f"--peer=127.0.0.1:{fleet.free_port()}"]
    addresses.append(f"--engine-socket={fleet.directory / 'other.sock'}")
    gone = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    script = f"import sys; {gone}from kvferryd.commands.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "serve", *addresses, *flags]
    ended = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode in (1, 2), ended.stdout
    return ended.stdout


async def no_package(at: Place) -> str:
    return await _serve(at, without=("uvicorn",))


async def no_nixl(at: Place) -> str:
    return await _serve(at, without=("nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"))


async def bad_settings(at: Place) -> str:
    said = await _serve(at, "--way", "sideways", "--arena-mb", "-5")
    assert "sideways" in said
    assert "arena_mb" in said
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
    with pytest.raises(KvferryError) as refused:
        await _described(at, "beyond", _with(offset=1 << 30))
    return refused.value.code


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
    at: Place, engine_id: str, change: Change = lambda said: said, shape: Shape = TP1
) -> tuple[EngineClient, SourceBody]:
    """An engine with a daemon of its own, which describes its cache so."""
    daemon, epoch = await at.own(), uuid.uuid4().hex
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
    reader, _ = await engine_on(at.stack, "asks", await at.own("--allow-peers", "no-such-host.invalid"))
    source = SourceBody(engine_id="nameless", address="no-such-host.invalid:7411")
    with pytest.raises(TransferFailed) as failed:
        await reader.receive(at.request_id, reader.take(50), source=source, deadline_s=2.0)
    return str(failed.value)


async def silent(at: Place) -> str:
    still = await at.own()
    with seen.standing_still(still):
        return await at.fails(SourceBody(engine_id="still", address=still.peer), deadline_s=TIMEOUT_S)


async def unproven(at: Place) -> str:
    secret = at.daemons.fleet.directory / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    daemon = await at.own("--peer-secret-file", str(secret))
    said = await at.fails(SourceBody(engine_id="guarded", address=daemon.peer))
    assert daemon.peer in await at.kvferry("peers")
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
        await router.order(OrderBody(request_id=at.request_id, source=at.scene.source.source(), deadline_ms=5000))
        await reader.ranks[0].client.receive(at.request_id, reader.take(50).tables(), attempt=reader.next_attempt())
        daemons[1].process.kill()
        (record,) = await router.transfers(at.request_id, wait_s=TIMEOUT_S)
    return await at.kvferry("transfers", "--state", "failed", at=daemons[0]) + str(record.error)


async def an_earlier_attempt(at: Place) -> str:
    (rank,), source = at.scene.reader.ranks, at.scene.source.source()
    blocks = at.scene.reader.take(50).tables()
    with pytest.raises(TransferFailed):
        await rank.client.receive(at.request_id, blocks, source=source, attempt=1 << 20, deadline_s=0.3)
    await rank.client.quiesced(at.request_id)
    with pytest.raises(KvferryError) as refused:
        await rank.client.receive(at.request_id, blocks, source=source, attempt=1)
    return refused.value.code


async def other_weights(at: Place) -> str:
    source, _ = await engine_on(at.stack, "trained", await at.own())
    await source.ranks[0].client.replace_weights("B")
    await published(source, at.request_id)
    return await at.fails(source.source())


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
    return await at.fails(at.scene.source.source(epoch="another"))


async def impossible_way(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    said = await at.fails(at.scene.source.source(), way="mapped")
    assert "mapped" in await at.kvferry("peers")
    return said


async def unlike(at: Place) -> str:
    daemon = await at.own()
    source = await TestEngine.start("unlike", [daemon], TP1, fingerprint="another")
    at.stack.push_async_callback(source.close)
    said = await at.fails(source.source())
    assert "fingerprint" in await at.kvferry("explain", "--transfer", at.request_id)
    return said


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
    return await _refused(at, (await _described(at, "unlike", _with(encoding="fp16")))[1])


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

    return await _refused(at, (await _described(at, "unlike", turned))[1])


async def half_of_the_heads(at: Place) -> str:
    source = await TestEngine.start("half", [await at.own()], Shape(((0, HEADS // 2),), num_blocks=16))
    at.stack.push_async_callback(source.close)
    return await _refused(at, source.source())


# ---- and what is left ----


async def no_transfers(at: Place) -> str:
    _, router = await engine_on(at.stack, "asks-none", daemon := await at.own())
    assert not await router.transfers()
    return await at.kvferry("transfers", at=daemon)


async def unread(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    said = await at.line("leases", at.request_id, at=at.scene.there)
    await at.scene.source_router.revoke_lease(at.request_id)
    return said


@dataclass(frozen=True)
class By:
    """The symptom is made by this test. file: below tests/. needs: what the test's machine has to have."""

    file: str
    test: str
    needs: str = ""


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
    (READY, "`... peers of the daemon before are not back yet`"): By(
        "faults/test_met_again.py", "test_a_peer_that_does_not_answer_does_not_hold_ready"
    ),
    (READY, "`draining`"): draining,
    (READY, "`require_rdma is set and ...`"): no_rdma,
    (ATTACH, "`unreachable`"): nobody_there,
    (ATTACH, "`epoch_reused`"): same_epoch,
    (ATTACH, "`engine_attached`"): attached_twice,
    (ATTACH, "`region_mismatch`, `out_of_region`, `overlapping_components`"): no_room_for_it,
    (ATTACH, "`wrong_gpu`, `unknown_gpu`"): By(
        "gpu/test_memory.py", "test_what_is_not_inside_the_engines_allocation_is_not_adopted", "a GPU"
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
    (FAILS, "... `answers, and NIXL does not connect to its memory`"): By(
        "faults/test_dying_peers.py", "test_a_daemon_that_answers_and_cannot_be_read_is_named"
    ),
    (FAILS, "... `is no kvferry peer port`"): rest_port,
    (FAILS, "`proof_failed`"): unproven,
    (FAILS, "`rank_lost`"): rank_dies,
    (FAILS, "`rank_failed`"): rank_refuses,
    (FAILS, "`lease_changed`"): By(
        "integration/test_one_lease.py", "test_ranks_that_read_two_publishes_of_a_request_are_not_done"
    ),
    (FAILS, "`superseded`, `stale_attempt`"): an_earlier_attempt,
    (FAILS, "`peer_lost`"): By(
        "integration/test_lifecycle.py", "test_a_reader_of_a_killed_daemon_fails_cleanly_and_its_blocks_become_safe"
    ),
    (FAILS, "`lease_ended`, `torn`"): lease_over,
    (FAILS, "`tokens_unpublished`"): unpublished,
    (FAILS, "`other_prompt`"): other_prompt,
    (FAILS, "`other_weights`, `mixed_weights`"): other_weights,
    (FAILS, "`refused`, with `refusals`"): unlike,
    (FAILS, "`divided`"): a_part_of_a_block,
    (FAILS, "`stale_epoch`, `stale_instance`, `engine_taken`"): other_epoch,
    (FAILS, "`deadline`"): late,
    (FAILS, "`way_unavailable`, `cannot_stage`"): impossible_way,
    (FAILS, "`malformed_metadata`"): By(
        "faults/test_hostile_metadata.py", "test_metadata_that_no_agent_wrote_is_refused_and_the_real_peer_is_read"
    ),
    (REFUSED, "`fingerprint`, `total`, `inner_extent`, `missing_component`"): unlike,
    (REFUSED, "`encoding`, `dtype`"): other_encoding,
    (REFUSED, "`divided`"): blocks_of_opaque_bytes,
    (REFUSED, "`uncovered`"): half_of_the_heads,
    (REFUSED, "`axes`, `group_kind`, `token_shard`"): other_axes,
    (NOTHING, "`vllm:kvferry_missed_handovers_total` rises"): By(
        "engines/test_vllm_lives.py", "test_params_that_mean_nothing_are_prefilled_here", "a real vLLM"
    ),
    (NOTHING, "it does not, and decode's daemon lists no transfers"): no_transfers,
    (MEMORY, "blocks stay reserved after a failure"): By(
        "faults/test_quarantine_tcp.py", "test_blocks_of_a_cancelled_receive_are_given_to_nobody_until_they_are_quiet"
    ),
    (MEMORY, "`kvferry_unfreed_bytes` is above 0"): By(
        "unit/test_retired_by_halves.py", "test_memory_that_could_not_be_freed_is_accounted_for"
    ),
    (MEMORY, "prefill's blocks are not freed"): unread,
    (MEMORY, "GPU memory of a dead source stays taken"): By(
        "gpu/test_memory.py", "test_memory_of_a_killed_engine_is_readable_and_taken_until_it_is_closed", "a GPU"
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
    lines = [line for line in at.scene.here.log.read_text().splitlines() if "peer met" in line]
    assert all(step in lines[-1] for step in ("asking", "screening", "planning", "loading"))
    return lines[-1]


async def only_direct(at: Place) -> str:
    await published(at.scene.source, at.request_id)
    await at.scene.reader.receive(at.request_id, at.scene.reader.take(50), source=at.scene.source.source())
    (record,) = await at.scene.router.transfers(at.request_id)
    assert record.path == "direct" and record.descriptors > 1
    return await at.kvferry("peers")


STEPS: dict[str, tuple[Maker, str] | By] = {
    "`kvferry explain --transfer REQUEST`": (a_late_publish, "waited .* to publish"),
    "`waiting` is long": (a_late_order, "waited .* for the router's order"),
    "`connecting` is long the first time": (a_first_meeting, "peer met"),
    "`reading` is long and the path is `direct`": (only_direct, "seen-source: mapped cannot be had: "),
    "`reading` is long and the rate is that of TCP": (no_rdma, "require_rdma is set and "),
    "`kvferry_queue_depth` stays above 0": By(
        "integration/test_staged.py", "test_transfers_wait_for_slots_that_a_slow_reader_holds_and_metrics_say_so"
    ),
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


@pytest.mark.parametrize("step", [step for step, made in STEPS.items() if not isinstance(made, By)])
async def test_a_step_shows_what_it_says(place: Place, step: str) -> None:
    made = STEPS[step]
    assert not isinstance(made, By)
    maker, shows = made
    said = await maker(place)
    assert re.search(shows, said), said


ELSEWHERE = {row: made for row, made in MADE.items() if isinstance(made, By)}
ELSEWHERE |= {("A transfer is slow", step): made for step, made in STEPS.items() if isinstance(made, By)}
HERE = {row: made for row, made in MADE.items() if not isinstance(made, By)}


def _ids(made: dict[tuple[str, str], object]) -> list[str]:
    return [f"{heading}: {cell}".replace("`", "") for heading, cell in made]


@pytest.mark.parametrize("made", ELSEWHERE.values(), ids=_ids(ELSEWHERE))
def test_a_row_that_is_made_elsewhere_names_a_test(made: By) -> None:
    code = (TESTS / made.file).read_text()
    assert re.search(rf"^(async )?def {made.test}\b", code, re.MULTILINE)


@pytest.fixture
def place(scene: seen.Scene, daemons: Daemons, stack: AsyncExitStack, request_id: str, kvferry: seen.Kvferry) -> Place:
    return Place(scene, daemons, stack, f"{uuid.uuid4().hex[:8]}-{request_id}"[:60], kvferry)


@pytest.mark.parametrize("row", HERE, ids=_ids(HERE))
async def test_the_symptom_is_seen_where_the_page_says(place: Place, row: tuple[str, str]) -> None:
    said = re.sub(r"\s+", " ", await HERE[row](place))
    words = [phrase.split("...") for phrase in re.findall(r"`([^`]+)`", row[1].replace("[...]", "..."))]
    assert not words or any(all(part.strip() in said for part in phrase) for phrase in words), said
