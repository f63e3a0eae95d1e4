"""Strict exposure against a real attacker: a program of its own, with a raw NIXL agent and all that a peer is told."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import SPOKEN, TCP_ALONE, TIMEOUT_S, Daemons, peer_stub
from lives import engine_on, reads_from
from ranks import TestEngine
from test_strict import pool

from kvferry.v1 import peer_pb2
from kvferryd.transport.read import Span

pytestmark = pytest.mark.anyio
ATTACKER = Path(__file__).with_name("attacker.py")
STRICT, OPEN = ("--strict", "--arena-mb", "4"), ("--way", "direct")
TRANSPORTS = {"within a host": "all", "tcp": TCP_ALONE}


class Scene:
    """An engine with a prompt that a peer reads, and one that nobody has asked for."""

    def __init__(self, engine: TestEngine, transport: str, folder: Path) -> None:
        self.engine, self.transport, self.folder = engine, transport, folder
        self.marks = [uuid.uuid4().bytes * 4 for _ in range(8)]

    @property
    def cache(self) -> Span:
        """The span at which its daemon has it: more than a peer of a strict daemon is told."""
        return pool(self.engine)

    async def attack(self, *, forge: bool = False) -> tuple[peer_pb2.HandshakeReply, dict[int, bool], bytes]:
        """(what it was told, which ranges it could read by their address, all that it got)."""
        async with peer_stub(self.engine.daemons[0]) as stub:
            request = peer_pb2.HandshakeRequest(**SPOKEN, engine_id=self.engine.engine_id)
            said = await stub.Handshake(request)
        loot = self.folder / uuid.uuid4().hex
        also = [[self.cache.address, self.cache.nbytes]]
        job = {"said": said.SerializeToString().hex(), "also": also, "forge": forge, "loot": str(loot)}
        attacker = await asyncio.create_subprocess_exec(
            sys.executable, ATTACKER, stdin=-1, stdout=-1, env=os.environ | {"UCX_TLS": self.transport}
        )
        try:
            told, _ = await asyncio.wait_for(attacker.communicate(json.dumps(job).encode()), TIMEOUT_S)
        finally:
            if attacker.returncode is None:
                attacker.kill()
        return said, {address: whole for address, _, whole in json.loads(told)}, loot.read_bytes()


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS.keys())
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def scene(daemons: Daemons, stack: AsyncExitStack, flags: tuple[str, ...], transport: str, tmp: Path) -> Scene:
    name = f"hoard-{uuid.uuid4().hex[:6]}"
    both = [(await daemons.start(f"{name}-{each}", 1, *flags, "--ucx", f"TLS={transport}"))[0] for each in "sr"]
    source, _ = await engine_on(stack, f"{name}-s", both[0])
    reader, _ = await engine_on(stack, f"{name}-r", both[1])
    await reads_from(reader, source, "asked for")
    found = Scene(source, transport, tmp)
    for number, mark in enumerate(found.marks):  # marks of prompts that no peer has asked for
        at = 10_000 * (number + 1)
        source.ranks[0].memory[at : at + len(mark)] = list(mark)
    return found


async def test_with_what_it_was_given_it_reads_staging_slots_and_nothing_of_the_cache(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path, transport: str
) -> None:
    strict = await scene(daemons, stack, STRICT, transport, tmp_path)
    said, reached, loot = await strict.attack()
    assert reached.pop(said.staging.address), "it reads the slots: what is said of the rest means something"
    assert not reached.pop(strict.cache.address)
    assert len(reached) == 2, "beside the slots only the daemon's own words: of leases, and of its agent"
    assert len(loot) < said.staging.nbytes + (1 << 18)
    assert not [mark for mark in strict.marks if mark in loot]
    assert strict.engine.daemons[0].process.poll() is None


@pytest.mark.slow
async def test_of_a_daemon_that_is_not_strict_the_same_program_gets_the_cache(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    loose = await scene(daemons, stack, OPEN, TCP_ALONE, tmp_path)
    _, reached, loot = await loose.attack()
    assert reached[loose.cache.address]
    assert all(mark in loot for mark in loose.marks)


@pytest.mark.slow
async def test_what_is_not_held_over_tcp_ucx_checks_no_key(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """docs/security.md says so. An RDMA device checks the range of a key; UCX's own emulation copies from any address.
    When this fails UCX has learnt to, and the document is to be changed."""
    strict = await scene(daemons, stack, STRICT, TCP_ALONE, tmp_path)
    _, reached, loot = await strict.attack(forge=True)
    assert reached[strict.cache.address]
    assert all(mark in loot for mark in strict.marks)
