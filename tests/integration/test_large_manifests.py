"""An engine whose manifest takes its time to read keeps nobody else from being answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import refusal
from ranks import Shape, describe

from kvferry.engine import EngineClient
from kvferry.v1 import engine_pb2, layout_pb2
from kvferryd.api import engine as door
from kvferryd.config import Config
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics
from kvferryd.process.serve import _engine_server

pytestmark = pytest.mark.anyio


@dataclass
class Reading:
    """A daemon that begins to read a manifest, and goes on when it may."""

    ferry: Ferry
    socket: str
    begun: threading.Event
    may_go_on: threading.Event

    async def connect(self, engine_id: str) -> EngineClient:
        return await EngineClient.connect(self.socket, engine_id=engine_id, epoch="1", timeout_s=60)


@pytest.fixture
async def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reading]:
    begun, may_go_on, read = threading.Event(), threading.Event(), door.manifest_from_proto

    def reads(told: layout_pb2.Manifest) -> Any:
        begun.set()
        assert may_go_on.wait(20), "the test is not answered meanwhile"
        return read(told)

    monkeypatch.setattr(door, "manifest_from_proto", reads)
    socket = tmp_path / "engine.sock"
    ferry = Ferry(Config(engine_socket=socket), Metrics())
    async with _engine_server(ferry):
        yield Reading(ferry, str(socket), begun, may_go_on)
    await ferry.close()


async def test_others_are_answered_while_a_manifest_is_read(reading: Reading) -> None:
    """The small call begins when the reading has begun, and the reading ends when the small call has."""
    large, small = [await reading.connect(name) for name in ("large", "small")]
    request = engine_pb2.RegisterRequest(session=large.session, manifest=layout_pb2.Manifest())
    registering = asyncio.ensure_future(large._session.stub.Register(request, timeout=60))
    assert await asyncio.to_thread(reading.begun.wait, 20)
    await small.abort("r")
    reading.may_go_on.set()
    assert (await refusal(registering)).code == "malformed_manifest"
    await asyncio.gather(large.close(), small.close())


async def test_an_engine_that_goes_while_its_manifest_is_read_registers_nothing(reading: Reading) -> None:
    client, shape = await reading.connect("e"), Shape(num_blocks=4)
    region = await client.allocate(shape.nbytes(0))
    registering = asyncio.create_task(client.register(describe("e", "1", shape, 0, region)))
    assert await asyncio.to_thread(reading.begun.wait, 20)
    await reading.ferry.registry.end(client.session)
    reading.may_go_on.set()
    assert (await refusal(registering)).code == "unknown_session"
    assert not list(reading.ferry.registry)
    await client.close()
