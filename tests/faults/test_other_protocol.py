"""A daemon and a client of the last commit that spoke another protocol are refused at each of the three doors, by name,
in both directions, and nothing moves."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fleet import TIMEOUT_S, Daemons, refusal, until
from lives import TP1, engine_on, published
from older import git, unpacked
from ranks import Shape, start_rank

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import LeaseState, OrderBody
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ENGINE = "import asyncio, sys, engine_process; asyncio.run(engine_process.main(*sys.argv[1:]))"
OF_TWO = """
import asyncio, sys
from pathlib import Path
from ranks import Shape, start_rank

async def main():
    rank = await start_rank("of-two", Path(sys.argv[1]), Shape.tp(2, num_blocks=16), int(sys.argv[2]), "1")
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its PYTHONPATH."""
    last = git(
        "log", "-1", "--first-parent", "-G^PROTOCOL_MIN, PROTOCOL_MAX", "--format=%H", "--", "clients/kvferry/rpc.py"
    )
    return unpacked(git("rev-parse", f"{last}^"), tmp_path_factory.mktemp("older"), "tests/integration")


@pytest.fixture(scope="module")
async def older(daemons: Daemons, old: str) -> DaemonService:
    """A daemon of it."""
    with pytest.MonkeyPatch.context() as inherited:
        inherited.setenv("PYTHONPATH", old)
        (daemon,) = await daemons.start("older")
    return daemon


@asynccontextmanager
async def running(old: str, script: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program with the older client."""
    pipe = asyncio.subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": old}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *arguments, stdout=pipe, stderr=pipe, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        assert await process.stdout.readline() == b"ready\n"


async def test_an_older_client_is_refused_and_an_older_daemon_refuses(
    daemons: Daemons, old: str, older: DaemonService
) -> None:
    (new,) = await daemons.start("newer-for-a-client")
    async with running(old, ENGINE, str(new.socket), "late", "1", "publish", "r") as process:
        async with asyncio.timeout(TIMEOUT_S):
            _, said = await process.communicate()
    assert process.returncode and b"you speak protocol" in said
    async with RouterClient(new.url) as router:
        assert not await router.engines()
    assert (await refusal(start_rank("early", older.socket, TP1, 0, "1"))).code == "protocol"


async def test_an_older_reader_is_refused_and_reads_nothing(
    daemons: Daemons, stack: AsyncExitStack, old: str, older: DaemonService
) -> None:
    (new,) = await daemons.start("newer-source")
    source, leases = await engine_on(stack, "newer-source", new)
    await published(source, "r")
    async with running(old, ENGINE, str(older.socket), "older-reader", "1", "receive", "r") as process:
        await ready(process)
        async with RouterClient(older.url) as router:
            ordered = await router.order(OrderBody(request_id="r", source=source.source()))
            record = await router.wait(ordered.transfer_id, timeout_s=TIMEOUT_S)
    assert record.error is not None and record.error.code == "protocol"
    (lease,) = await leases.leases()
    assert (lease.state, lease.readers) == (LeaseState.PUBLISHED, [])


async def test_an_older_source_is_not_read(
    daemons: Daemons, stack: AsyncExitStack, old: str, older: DaemonService
) -> None:
    (new,) = await daemons.start("newer-reader")
    reader, _ = await engine_on(stack, "newer-reader", new)
    before = reader.snapshot()
    async with running(old, ENGINE, str(older.socket), "older-source", "1", "publish", "r") as process:
        await ready(process)
        source = reader.source().model_copy(update={"engine_id": "older-source", "address": older.peer})
        with refused("protocol", TransferFailed, blocks_safe=True):
            await reader.receive("r", reader.take(50), source=source)
        async with RouterClient(older.url) as router:
            assert [lease.state for lease in await router.leases()] == [LeaseState.PUBLISHED]
    assert not reader.differences(before)


@pytest.mark.parametrize("seed", ["new", "old"])
async def test_an_older_rank_does_not_join_nor_is_it_joined(
    daemons: Daemons, old: str, monkeypatch: pytest.MonkeyPatch, seed: str
) -> None:
    async def start(version: str, roster: DaemonService | None) -> DaemonService:
        with monkeypatch.context() as inherited:
            if version == "old":
                inherited.setenv("PYTHONPATH", old)
            if roster is None:
                return (await daemons.start(f"{seed}-seed"))[0]
            return await daemons.start_rank(f"{seed}-member", roster)

    versions = (seed, "old" if seed == "new" else "new")
    first = await start(versions[0], None)
    second = await start(versions[1], first)
    ranks = {
        version: (daemon, rank) for rank, (version, daemon) in enumerate(zip(versions, (first, second), strict=True))
    }
    (ours, own_rank), (theirs, other_rank) = ranks["new"], ranks["old"]
    rank = await start_rank("of-two", ours.socket, Shape.tp(2, num_blocks=16), own_rank, "1")
    async with running(old, OF_TWO, str(theirs.socket), str(other_rank)) as process:
        await ready(process)

        async def refused() -> bool:
            lines = second.log.read_text().splitlines()
            return any("roster not joined" in line and "you speak protocol" in line for line in lines)

        await until(refused, "the member is told that it speaks another protocol")
        async with RouterClient(ours.url) as router:
            (engine,) = await router.engines()
        assert other_rank not in engine.members
    await rank.client.close()
