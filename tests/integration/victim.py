"""A daemon that everything bad is done to."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from lives import published
from pair import Pair
from ranks import Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import LeaseState
from kvferry.v1 import engine_pb2_grpc
from kvferryd.demo.fleet import DaemonService

SHAPE = Shape.tp(1, num_blocks=32)
OWN_FAULT = re.compile(r'"logger": "kvferryd.*Traceback|Traceback.*"logger": "kvferryd|Fatal|never retrieved')
NOWHERE = "192.0.2.1:7411"


@dataclass
class Victim:
    engine: TestEngine
    daemon: DaemonService
    router: RouterClient
    http: httpx.AsyncClient
    engine_door: engine_pb2_grpc.EngineAsyncStub
    open_files: int = 0


async def a_good_transfer(pair: Pair, victim: Victim, request_id: str) -> None:
    kv, leases = await published(pair.prefill, request_id)
    await victim.engine.gets(request_id, kv, source=pair.prefill.source())
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


@contextmanager
def unused_address() -> Iterator[str]:
    """It is ours, and nobody listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
