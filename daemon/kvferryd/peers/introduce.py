"""Ask the daemon at an address which rank it serves, and how that is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from kvferry import __version__
from kvferry.errors import LONGEST, Conflict, PeerFailed, shorten
from kvferry.manifest import Manifest
from kvferry.manifest.model import MOST
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import layout_digest, manifest_from_proto
from kvferryd.engine import Engine
from kvferryd.engine.registry import MAX_WORLD_SIZE
from kvferryd.peers.channels import Channel, Channels
from kvferryd.peers.contact import asking
from kvferryd.peers.peer import PeerRank, Staging, as_reader
from kvferryd.staging.arena import SLOT_ALIGN
from kvferryd.transport.metadata import connection_of
from kvferryd.transport.read import Span


class Introductions:
    def __init__(self, channels: Channels, timeout_s: float) -> None:
        """timeout_s: for each answer."""
        self._channels, self._timeout_s = channels, timeout_s
        self._layouts: WeakValueDictionary[bytes, Manifest] = WeakValueDictionary()
        """Manifests by the digest of all but the engine's name."""

    async def ask(
        self, engine: Engine, engine_id: str, address: str, *, staging: bool = False
    ) -> tuple[PeerRank, dict[int, str]]:
        """The rank that answers at this address, which is the caller's to close, and where the engine's ranks are, as
        it says. engine_id: empty for the only engine there. staging: it should have an arena. Raises KvferryError."""
        request = peer_pb2.HandshakeRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, version=__version__, engine_id=engine_id,
            staging=staging, agent_name=engine.agent.name, agent_connection=connection_of(engine.agent_metadata),
            ucx=engine.agent.listens_at,
        )  # fmt: skip
        channel = self._channels.open(address)
        try:
            async with asking(channel.contact):
                reply = await channel.stub.Handshake(request, timeout=self._timeout_s)
            _check_size(reply, address)
            manifest = await asyncio.to_thread(self._manifest, reply.manifest)
            rank = _rank(reply, manifest, channel, engine, engine_id or manifest.engine_id)
            return rank, {each.rank: each.address for each in reply.members}
        except BaseException:
            channel.close()
            raise

    async def ask_all(
        self, engine: Engine, engine_id: str, addresses: Sequence[str], asked: list[PeerRank], *, staging: bool = False
    ) -> list[tuple[PeerRank, dict[int, str]]]:
        """All of them to the end. Ranks that answer are in `asked` at once, so they are closed even if others fail."""

        async def ask(address: str) -> tuple[PeerRank, dict[int, str]]:
            answer = await self.ask(engine, engine_id, address, staging=staging)
            asked.append(answer[0])
            return answer

        answers = await asyncio.gather(*map(ask, addresses), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _manifest(self, told: layout_pb2.Manifest) -> Manifest:
        """Most engines of a fleet differ by their names alone: the rest is read, checked and kept once. Raises
        ManifestError."""
        key = layout_digest(told)
        like = self._layouts.get(key)
        manifest = manifest_from_proto(told) if like is None else like.of_engine(told.engine_id, told.epoch)
        self._layouts[key] = manifest  # the newest: it will be there for longest
        return manifest


def _check_size(reply: peer_pb2.HandshakeReply, address: str) -> None:
    """Before anything is made of it. Raises KvferryError (`malformed_handshake`)."""
    for name, most in {"regions": MOST["regions"], "members": MAX_WORLD_SIZE}.items():
        if (count := len(getattr(reply, name))) > most:
            why, remedy = f"peer {address} answered with more than {most} {name}", "see what listens there"
            raise PeerFailed("malformed_handshake", why, field=name, value=count, remedy=remedy)


def _rank(
    reply: peer_pb2.HandshakeReply, manifest: Manifest, channel: Channel, engine: Engine, engine_id: str
) -> PeerRank:
    """The rank that answered, as `engine` reads it. Raises KvferryError (`protocol`)."""

    def wrong(what: str, field: str, value: object) -> Conflict:
        remedy = f"this daemon speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}: run the same version on both sides"
        return Conflict("protocol", f"peer {channel.address} {what}", field=field, value=value, remedy=remedy)

    if not PROTOCOL_MIN <= reply.protocol <= PROTOCOL_MAX:
        raise wrong(f"chose protocol {reply.protocol}", "protocol", reply.protocol)
    if manifest.engine_id != engine_id:
        raise wrong(f"answered for engine {manifest.engine_id}", "engine_id", engine_id)
    regions, staging = {region.id: _span(region) for region in reply.regions}, None
    if reply.HasField("staging"):
        staging = Staging(_span(reply.staging), reply.staging.slot_nbytes)
        if not SLOT_ALIGN <= staging.slot_nbytes <= staging.span.nbytes:
            raise wrong("has no sensible staging slots", "staging.slot_nbytes", staging.slot_nbytes)
    # A strict daemon tells where its staging slots are, and nothing else.
    for region in manifest.regions if regions or staging is None else ():
        if region.id not in regions or regions[region.id].nbytes < region.nbytes:
            raise wrong(f"gave no address for region {region.id}", "regions", region.id)
    opening = peer_pb2.ReadOpening(
        engine_id=engine_id, epoch=manifest.epoch, reader=as_reader(engine, engine_id), several=True,
        agent_name=reply.agent_name,
    )  # fmt: skip
    told = reply.protocol, reply.version, reply.agent_name, reply.agent_metadata
    slow = any(region.slow for region in reply.regions)
    listens = shorten(", ".join(reply.ucx), LONGEST)
    rest = shorten(reply.rest, LONGEST)
    return PeerRank(channel, manifest, *told, regions, opening, staging, slow, reply.several, listens, rest)


def _span(told: peer_pb2.RegionAddress | peer_pb2.Staging) -> Span:
    kind = "cuda" if told.kind == layout_pb2.MEMORY_KIND_CUDA else "host"
    return Span(told.address, told.nbytes, kind, told.device)
