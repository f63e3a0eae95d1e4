"""The command line's words on peers that fail: each symptom is made with real daemons."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from fleet import TIMEOUT_S, Daemons, logged, until
from lives import engine_on, never_written, published, reads_from
from ranks import Shape, TestEngine

from kvferry import __version__
from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import LeaseState, SourceBody, Standing
from kvferryd.commands import say
from kvferryd.commands.cli import main
from kvferryd.demo.fleet import DaemonService, Fleet
from stopping import stopped
from support import refused

pytestmark = pytest.mark.anyio
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
Kvferry: TypeAlias = Callable[..., Awaitable[tuple[int, str]]]


@dataclass
class Scene:
    """A daemon that is read from, and one that reads, which is asked."""

    source: TestEngine
    reader: TestEngine
    router: RouterClient
    source_router: RouterClient

    @property
    def there(self) -> DaemonService:
        return self.source.daemons[0]

    @property
    def here(self) -> DaemonService:
        return self.reader.daemons[0]

    async def moved(self, request_id: str) -> None:
        for lease in await reads_from(self.reader, self.source, request_id):
            assert await lease.ended() is LeaseState.RELEASED

    async def well(self) -> bool:
        """Whether the source is read from again, and nothing warns of it."""
        with suppress(TransferFailed):
            await self.moved(f"again-{uuid.uuid4().hex}")
        return not (await self.router.ready()).warnings

    async def read_again(self) -> bool:
        """The same, whatever warnings there are of others."""
        with suppress(TransferFailed):
            await self.moved(f"again-{uuid.uuid4().hex}")
            return True
        return False

    async def failure(self, request_id: str, address: str, deadline_s: float = 20.0) -> TransferFailed:
        """The error of a request that is to be read from there."""
        source = SourceBody(engine_id=self.source.engine_id, address=address)
        with pytest.raises(TransferFailed) as failed:
            await self.reader.receive(request_id, self.reader.take(50), source=source, deadline_s=deadline_s)
        return failed.value


@pytest.fixture
def kvferry(capsys: pytest.CaptureFixture[str]) -> Kvferry:
    """A command's exit status, and what it printed."""

    async def command(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, arguments)
        return status, capsys.readouterr().out

    return command


@pytest.fixture(scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with Fleet(tmp_path_factory.mktemp("seen")) as fleet, AsyncExitStack() as stack:
        yield await scene_of(Daemons(fleet), stack)


async def scene_of(daemons: Daemons, stack: AsyncExitStack) -> Scene:
    (there,), (here,) = await asyncio.gather(daemons.start("there"), daemons.start("here"))
    source, source_router = await engine_on(stack, "seen-source", there)
    reader, router = await engine_on(stack, "seen-reader", here)
    return Scene(source, reader, router, source_router)


async def test_a_peer_is_shown_with_how_it_fares_and_with_the_ways_that_cannot_be_had(
    scene: Scene, kvferry: Kvferry, request_id: str
) -> None:
    for number in range(2):
        await scene.moved(f"{request_id}-{number}")
    status, said = await kvferry("peers", "--daemon", scene.here.url)
    heads, row, *more = said.splitlines()
    assert status == 0
    assert heads.split()[:9] == ["STATE", "ENGINE", "RANK", "ADDRESS", "PATH", "P50", "P99", "RATE", "READ"]
    assert row.split()[:4] == ["connected", "seen-source", "0", scene.there.peer]
    (peer,) = await scene.router.peers()
    assert peer.p50_ms is not None and peer.p99_ms is not None
    figures = (
        say.duration(peer.p50_ms),
        say.duration(peer.p99_ms),
        say.rate(peer.bytes_per_s),
        say.size(peer.bytes_read),
    )
    assert re.split(r" {2,}", row)[4:11] == [peer.path, *figures, str(peer.transfers), "0"]
    phases = [f"{name} {say.duration(it.p99_ms)}/{say.duration(it.worst_ms)}" for name, it in peer.phases.items()]
    assert f"seen-source rank 0: p99 of the last 100/worst of 5 min: {', '.join(phases)}" in more
    assert [line for line in more if line.startswith("seen-source: mapped cannot be had: ")]

    status, said = await kvferry("peers", "--daemon", scene.there.url)
    assert status == 0
    assert said.startswith("no peers yet\n")
    reads = said.splitlines()[-1].split()
    assert (reads[0], reads[1], reads[3]) == ("seen-reader", "0/1", "seen-source")


async def test_a_peer_that_stands_still_comes_first_and_is_an_exit_status(
    scene: Scene, kvferry: Kvferry, request_id: str
) -> None:
    await scene.moved(request_id)
    with stopped(scene.there.process.pid):
        await scene.failure(f"{request_id}-late", scene.there.peer, deadline_s=1.0)
        status, said = await kvferry("peers", "--daemon", scene.here.url)
        assert status == 1
        row = said.splitlines()[1].split()
        assert row[0] in ("failing", "lost")
        assert row[1:4] == ["seen-source", "0", scene.there.peer]
        assert f"seen-source rank 0 at {scene.there.peer} (" in said
        status, said = await kvferry("peers", "--json", "--daemon", scene.here.url)
        assert status == 1
        told = json.loads(said)
        assert {"peers", "lost", "unmet", "inbound"} <= told.keys()
        assert [each for each in (*told["peers"], *told["lost"]) if each["failures"]]

    await until(scene.well, "the peer is well again")
    assert (await kvferry("peers", "--daemon", scene.here.url))[0] == 0


async def test_status_says_what_is_wrong_moved_and_held(
    kvferry: Kvferry, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    scene = await scene_of(daemons, stack)
    await scene.moved(request_id)
    status, said = await kvferry("status", "--daemon", scene.here.url)
    assert status == 0
    assert said.startswith(f"kvferry {__version__} at {scene.here.url}: ready\n")
    totals, (engine,) = await asyncio.gather(scene.router.totals(), scene.router.engines())
    assert totals.read_bytes > 0
    assert f"{say.size(totals.read_bytes)} read, 0 B served" in said
    assert f"{say.size(totals.staging_bytes)} (0 B in use), process " in said
    assert totals.process_bytes > 16 << 20
    assert say.size(engine.cache_bytes) in said
    assert engine.cache_bytes == scene.reader.ranks[0].region.nbytes

    with stopped(scene.there.process.pid):
        await scene.failure(f"{request_id}-late", scene.there.peer, deadline_s=1.0)
        status, said = await kvferry("status", "--daemon", scene.here.url)
        assert (status, said.splitlines()[0].rpartition(": ")[2]) == (1, "degraded, 1 failure in 5 min, 1 warning")
        assert f"warning: engine seen-source: rank 0 at {scene.there.peer} has not answered" in said
        told = json.loads((await kvferry("status", "--json", "--daemon", scene.here.url))[1])
        assert told.keys() == {"ready", "info", "engines", "drain", "totals", "peers", "last_failure"}
        assert (await kvferry("status", "--ready", "--daemon", scene.here.url))[0] == 0
    await until(scene.well, "the peer is well again")
    status, said = await kvferry("status", "--daemon", scene.here.url)
    assert status == 1, "what failed a moment ago is not forgotten with the warning"
    assert re.fullmatch(r"degraded, \d+ failures? in 5 min", said.splitlines()[0].rpartition(": ")[2])
    assert f"failed: request {request_id}-late at " in said or "failed: request again-" in said


async def test_a_lease_that_nobody_has_read_is_counted_and_does_not_degrade_its_source(
    kvferry: Kvferry, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    """Its client may have left: nothing is wrong with the daemon."""
    (alone,) = await daemons.start("unread")
    source, router = await engine_on(stack, "unread-source", alone)
    (lease,) = (await published(source, request_id, ttl_s=0.2))[1]
    assert await lease.ended() is LeaseState.EXPIRED
    status, said = await kvferry("status", "--daemon", alone.url)
    assert (status, said.splitlines()[0].rpartition(": ")[2]) == (0, "ready")
    assert "0 done, 0 failed, 1 lease expired unread" in said
    assert ((await router.totals()).leases["expired"], (await router.ready()).state) == (1, Standing.READY)
    status, said = await kvferry("leases", "--ended", "20", "--daemon", alone.url)
    assert (status, said.splitlines()[1].split()[:2]) == (0, ["expired", request_id])


async def test_a_lease_that_could_not_be_published_is_a_failure_of_its_source(
    kvferry: Kvferry, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (alone,) = await daemons.start("unpublished", 1, "--fence-timeout-s", "0.2")
    source, router = await engine_on(stack, "unpublished-source", alone)
    assert (await kvferry("status", "--daemon", alone.url))[0] == 0
    await never_written(source, request_id)

    async def degraded() -> bool:
        return (await router.ready()).state is Standing.DEGRADED

    await until(degraded, "the fence is late")
    status, said = await kvferry("status", "--daemon", alone.url)
    assert (status, said.splitlines()[0].rpartition(": ")[2]) == (1, "degraded, 1 failure in 5 min")
    assert f"failed: request {request_id} at " in said and "fence_timeout" in said
    assert (await router.ready()).ready


async def test_leases_are_listed_with_who_reads_them(scene: Scene, kvferry: Kvferry, request_id: str) -> None:
    await scene.moved(request_id)
    await published(scene.source, f"{request_id}-held")
    status, said = await kvferry("leases", "--daemon", scene.there.url)
    assert status == 0
    held, *ended = [line.split() for line in said.splitlines()[1:]]
    number = str(scene.source.lease(f"{request_id}-held"))
    assert held[:5] == ["published", f"{request_id}-held", number, "seen-source", "50"]
    (read,) = [line for line in ended if line[1] == request_id]
    assert read[:3] == ["released", request_id, str(scene.source.lease(request_id))]
    (record,) = await scene.router.transfers(request_id)
    assert f"seen-reader/0 read in attempt {record.attempt}," in " ".join(read)
    assert (
        len(json.loads((await kvferry("leases", "--ended", "0", "--json", "--daemon", scene.there.url))[1])["leases"])
        == 1
    )
    await scene.source_router.revoke_lease(f"{request_id}-held")


async def test_the_history_is_listed_by_time_and_by_peer(scene: Scene, kvferry: Kvferry, request_id: str) -> None:
    await scene.moved(request_id)
    await scene.router.drain()
    await scene.router.cancel_drain()
    status, said = await kvferry("history", "--daemon", scene.here.url)
    assert status == 0
    times, peers = (each.splitlines()[1:] for each in said.split("\n\n"))
    assert " start" in "".join(times) and re.search(r" drain +by 127\.0\.0\.1", "".join(times))
    assert " drain cancelled" in "".join(times)
    (source,) = [line.split() for line in peers if line.startswith("seen-source")]
    totals = await scene.router.totals()
    assert source[1:3] == say.size(totals.read_bytes).split()
    told = json.loads((await kvferry("history", "--hours", "24", "--json", "--daemon", scene.there.url))[1])
    assert [each["engine_id"] for each in told["peers"]] == ["seen-reader"]
    assert told["peers"][0]["served_bytes"] == (await scene.source_router.totals()).served_bytes


async def test_a_transfer_has_one_rate_wherever_it_is_told(scene: Scene, kvferry: Kvferry, request_id: str) -> None:
    await scene.moved(request_id)
    (record,) = await scene.router.transfers(request_id)
    (share,) = record.ranks
    assert record.bytes_per_s == share.bytes_per_s > 0
    heads, *rows = (await kvferry("transfers", "--daemon", scene.here.url))[1].splitlines()
    (row,) = [line for line in rows if request_id[:20] in line]
    assert row[heads.index("RATE") : heads.index("TOTAL")].strip() == say.rate(record.bytes_per_s)
    (ended,) = await logged(scene.here, "transfer ended", request_id)
    assert ended["bytes_per_s"] == share.bytes_per_s


async def test_an_address_where_nobody_ever_answered_is_shown(scene: Scene, kvferry: Kvferry, request_id: str) -> None:
    nowhere = "127.0.0.1:9"
    failed = await scene.failure(request_id, nowhere)
    assert failed.code == "peer_unreachable"
    assert f"nobody listens at {nowhere}: the connection was refused" in str(failed)
    status, said = await kvferry("peers", "--daemon", scene.here.url)
    assert status == 1
    row = said.splitlines()[1].split()
    assert row[:4] == ["unmet", "-", "-", nowhere]
    assert "peer_unreachable" in row
    (warning,) = [each for each in (await scene.router.ready()).warnings if nowhere in each]
    assert "a daemon that was never met" in warning


async def test_the_rest_port_in_place_of_the_peer_port_is_named(
    scene: Scene, kvferry: Kvferry, request_id: str
) -> None:
    rest = scene.there.url.removeprefix("http://")
    failed = await scene.failure(request_id, rest)
    assert f"what listens at {rest} is no kvferry peer port" in str(failed)
    assert "is this the REST port" in failed.remedy
    for command in ("status", "peers"):
        status, said = await kvferry(command, "--daemon", scene.here.url)
        assert status == 1
        assert f"what listens at {rest} is no kvferry peer port" in said


async def test_silence_is_told_in_seconds(scene: Scene, kvferry: Kvferry, request_id: str) -> None:
    await scene.moved(request_id)
    with stopped(scene.there.process.pid):
        await scene.failure(f"{request_id}-late", scene.there.peer)

        async def told() -> bool:
            status, said = await kvferry("peers", "--daemon", scene.here.url)
            return status == 1 and f"{scene.there.peer} has not answered for " in said

        await until(told, "the silence is told in seconds")
    await until(scene.read_again, "the peer is well again")


async def test_all_ranks_of_an_engine_are_asked_by_its_roster(
    kvferry: Kvferry, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    ranks = await daemons.start("ranks", 3)
    engine = await TestEngine.start("ranks", ranks, Shape.tp(3, num_blocks=16))
    stack.push_async_callback(engine.close)
    await daemons.fleet.ready(*ranks, timeout_s=TIMEOUT_S, path="/readyz")  # all know of all
    urls = dict(enumerate(daemon.url for daemon in ranks))
    for daemon in ranks:  # at any of them
        status, said = await kvferry("status", "--all", "--daemon", daemon.url)
        assert status == 0
        rows = [line.split()[:4] for line in said.splitlines()[1:]]
        assert rows == [["ready", "ranks", str(rank), url] for rank, url in urls.items()]
    status, said = await kvferry("top", "--times", "2", "--every", "0.1", "--daemon", ranks[1].url)
    assert status == 0
    assert said.count("READ/S") == 2
    assert said.count("no transfers") == 2

    killed = datetime.now(UTC).replace(microsecond=0)
    ranks[2].process.kill()
    ranks[2].process.wait(TIMEOUT_S)

    async def told() -> bool:
        status, said = await kvferry("status", "--all", "--json", "--daemon", ranks[0].url)
        *there, gone = json.loads(said)["ranks"]
        return status == 1 and not any(each["ready"]["ready"] for each in there) and gone["error"] is not None

    await until(told, "a rank that has gone is shown")
    status, said = await kvferry("status", "--all", "--daemon", ranks[0].url)
    assert [line.split()[0] for line in said.splitlines()[1:4]] == ["not", "not", "no"]
    for rank in 0, 1:  # the one that keeps the roster, and another
        (line,) = [line for line in said.splitlines() if line.startswith(f"ranks rank {rank}: not ready: ")]
        assert "engine ranks: the daemons of ranks [2] have not joined, or have gone; " in line
        gone = re.search(f"rank 2 was at {ranks[2].peer} until (.+) UTC$", line)
        assert gone is not None, line
        at = datetime.strptime(gone[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        assert killed <= at <= datetime.now(UTC)
    (line,) = [line for line in said.splitlines() if line.startswith("ranks rank 2: ")]
    assert re.match(f"ranks rank 2: rank_left: it was at {ranks[2].peer} until .+ UTC -> ", line)


async def test_top_has_what_each_rank_moves_a_second(scene: Scene, request_id: str) -> None:
    top = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferryd", "top", "--json", "--every", "0.2", "--daemon", scene.here.url,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert top.stdout is not None
        looks = _looks(top.stdout)
        async with asyncio.timeout(TIMEOUT_S):
            first = await anext(looks)
            assert first["read_bytes_per_s"] is None, "the first look has nothing before it"
            await scene.moved(request_id)
            while not (look := await anext(looks))["read_bytes_per_s"]:
                assert look["read_bytes_per_s"] == 0
        assert look["read_bytes_per_s"] > 0 and look["served_bytes_per_s"] == 0
    finally:
        top.kill()
        await top.wait()


async def _looks(stream: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Rank 0 in each JSON document, as soon as it is there."""
    said, decoder = "", json.JSONDecoder()
    while part := await stream.read(1 << 16):
        said = (said + part.decode()).lstrip()
        with suppress(json.JSONDecodeError):
            while said:
                look, end = decoder.raw_decode(said)
                yield look["ranks"][0]
                said = said[end:].lstrip()


async def test_a_source_that_has_died_is_named_with_how_it_does_not_answer(
    kvferry: Kvferry, daemons: Daemons, stack: AsyncExitStack, scene: Scene, request_id: str
) -> None:
    (mortal,) = await daemons.start("mortal")
    source, _ = await engine_on(stack, "mortal-source", mortal)
    await reads_from(scene.reader, source, request_id)
    mortal.process.kill()
    mortal.process.wait(TIMEOUT_S)
    gone = SourceBody(engine_id="mortal-source", address=mortal.peer)
    with pytest.raises(TransferFailed) as failed:
        await scene.reader.receive(f"{request_id}-late", scene.reader.take(50), source=gone)
    assert failed.value.code in ("peer_unreachable", "peer_lost")

    async def told() -> bool:
        with suppress(TransferFailed):  # the next request dials anew
            await scene.reader.receive(f"{uuid.uuid4().hex}", scene.reader.take(50), source=gone)
        status, said = await kvferry("peers", "--daemon", scene.here.url)
        row = next((line.split() for line in said.splitlines() if "mortal-source" in line), [])
        return status == 1 and row[:1] in (["failing"], ["lost"]) and f"nobody listens at {mortal.peer}" in said

    await until(told, "the daemon that has died is named")
    status, said = await kvferry("status", "--daemon", scene.here.url)
    assert status == 1
    assert f"warning: engine mortal-source: rank 0 at {mortal.peer} has not answered" in said
    await kvferry("peers", "--forget", "mortal-source", "--daemon", scene.here.url)
    assert not [warning for warning in (await scene.router.ready()).warnings if "mortal" in warning]


async def test_certificates_for_another_name_are_told_with_both_names(
    scene: Scene, kvferry: Kvferry, daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    recipe = re.search(r"```sh\n(openssl req -x509.*?)```", OPERATIONS.read_text(), re.DOTALL)
    assert recipe is not None
    made = await asyncio.create_subprocess_exec(
        "sh", "-e", "-c", recipe[1].replace("10.0.0.8", "127.0.0.1"), cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    assert await asyncio.wait_for(made.wait(), TIMEOUT_S) == 0

    def proof(host: str) -> list[str]:
        files = {"cert": f"{host}.pem", "key": f"{host}.key", "ca": "ca.pem"}
        return [part for kind, file in files.items() for part in (f"--tls-{kind}", str(tmp_path / file))]

    (wrong,), (right,) = await asyncio.gather(
        daemons.start("wrong", 1, *proof("10.0.0.7")), daemons.start("right", 1, *proof("127.0.0.1"))
    )
    await engine_on(stack, "wrong-source", wrong)
    reader, router = await engine_on(stack, "right-reader", right)
    with refused("proof_failed", TransferFailed) as failed:
        await reader.receive("r", reader.take(50), source=SourceBody(engine_id="wrong-source", address=wrong.peer))
    why = "a certificate for 127.0.0.1 was expected, one for 10.0.0.7 was shown: it is for another name"
    assert f"{wrong.peer} does not prove itself: {why}" in str(failed.value)
    assert any(why in warning for warning in (await router.ready()).warnings)
    for command in ("status", "peers"):
        status, said = await kvferry(command, "--daemon", right.url)
        assert status == 1
        assert why in said
