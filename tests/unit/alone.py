"""Parts of a daemon without the rest of it: an engine, and a service for peers over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from caches import attention, cache

from kvferry.protocol.roster_events import Member
from kvferry.protocol.session_events import Rank
from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2_grpc
from kvferryd.copy.sums import Sums
from kvferryd.engine import Engine
from kvferryd.engine.membership import Membership
from kvferryd.engine.session import Session
from kvferryd.leases.leases import Leases
from kvferryd.transport.agent import Agent


def first_of(*others: str, rank: int = 0) -> Engine:
    """An engine whose other ranks' daemons have these addresses. Its agent is never started: nothing is read."""
    members = {at: Member(address) for at, address in enumerate(("127.0.0.1:1", *others))}
    session, leases = Session(Rank("e", "1", rank, len(members))), Leases("e", "1", lambda lease: None, 1)
    return Engine(
        session, Membership(session.rank, members), cache(*attention(), engine="e", of=len(members)), Agent("a"), b"",
        leases, Sums(),
    )  # fmt: skip


@asynccontextmanager
async def peer_served(service: peer_pb2_grpc.PeerServicer, port: int = 0) -> AsyncIterator[str]:
    """The address at which it answers. port: any that is free, where none is given."""
    server = grpc.aio.server(options=PEER_OPTIONS)
    peer_pb2_grpc.add_PeerServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
