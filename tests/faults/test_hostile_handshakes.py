"""The answer to a handshake may be anything: it is refused before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from fleet import SPOKEN, Daemons, peer_stub
from lives import engine_on
from test_hostile_metadata import impostor

from kvferry.errors import KvferryError
from kvferry.manifest.model import MOST
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2
from kvferryd.engine.registry import MAX_WORLD_SIZE
from kvferryd.staging.arena import SLOT_ALIGN

pytestmark = pytest.mark.anyio
Reply = peer_pb2.HandshakeReply


def with_regions(reply: Reply) -> None:
    reply.regions.extend([peer_pb2.RegionAddress()] * MOST["regions"])


def with_members(reply: Reply) -> None:
    reply.members.extend([peer_pb2.Member()] * MAX_WORLD_SIZE)


def with_small_slots(reply: Reply) -> None:
    """Which its own daemon would not pack: of chunks that small it has none."""
    reply.staging.nbytes, reply.staging.slot_nbytes = 1 << 20, SLOT_ALIGN // 2


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (with_regions, "malformed_handshake", "regions"),
        (with_members, "malformed_handshake", "members"),
        (with_small_slots, "protocol", "staging.slot_nbytes"),
    ],
)
async def test_an_answer_beyond_the_bounds_is_refused(
    daemons: Daemons, stack: AsyncExitStack, change: Callable[[Reply], None], code: str, field: str
) -> None:
    name = change.__name__
    (theirs,), (ours,) = await daemons.start(f"{name}-s"), await daemons.start(f"{name}-r")
    await engine_on(stack, f"{name}-s", theirs)
    _, router = await engine_on(stack, f"{name}-r", ours)
    async with peer_stub(theirs) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN))
    change(said)
    async with impostor(said) as (service, address):
        service.moves_to(address) if name == "with_small_slots" else None
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id=f"{name}-s", address=address))
    assert (refused.value.code, refused.value.field) == (code, field)
