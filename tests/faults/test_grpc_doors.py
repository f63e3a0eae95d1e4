"""Answers to a stranger with grpcurl: whether the process answers, and the protos where the caller is proven."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from fleet import TIMEOUT_S, Daemons
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lives import engine_on, published
from ranks import TestEngine
from test_peer_secret import NAME, OURS, secret_file

from kvferry.engine import EngineClient
from kvferry.schemas import SourceBody
from kvferry.v1 import engine_pb2, layout_pb2
from kvferryd.demo.fleet import DaemonService
from kvferryd.peers.secret import PeerSecret

pytestmark = pytest.mark.anyio
SERVING = health_pb2.HealthCheckResponse.SERVING


async def healthy(channel: grpc.aio.Channel, service: str) -> bool:
    asked = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=TIMEOUT_S)).status == SERVING


async def listed(channel: grpc.aio.Channel) -> set[str]:
    """The services that reflection tells of."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=TIMEOUT_S)
    return {service.name async for answer in call for service in answer.list_services_response.service}


@pytest.fixture(scope="module")
async def daemon(daemons: Daemons) -> DaemonService:
    (daemon,) = await daemons.start("open")
    return daemon


async def test_both_doors_say_that_the_process_answers(daemon: DaemonService) -> None:
    for target, service in ((f"unix:{daemon.socket}", "kvferry.v1.Engine"), (daemon.peer, "kvferry.v1.Peer")):
        async with grpc.aio.insecure_channel(target) as channel:
            assert await healthy(channel, "")
            assert await healthy(channel, service)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await healthy(channel, "kvferry.v2.Engine")
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_nobody_takes_a_place_by_watching_the_daemons_health(daemon: DaemonService) -> None:
    """Without proof, and for as long as he likes: it never changes."""
    for target in (f"unix:{daemon.socket}", daemon.peer):
        async with grpc.aio.insecure_channel(target) as channel:
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watching.read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_engine_and_a_proven_peer_are_told_the_protos_and_a_stranger_is_not(
    daemons: Daemons, daemon: DaemonService, tmp_path: Path
) -> None:
    async with grpc.aio.insecure_channel(f"unix:{daemon.socket}") as channel:
        assert "kvferry.v1.Engine" in await listed(channel)
    async with grpc.aio.insecure_channel(daemon.peer) as channel:
        # Nothing is said: what a client still writes when it is refused fails in its own gRPC.
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=TIMEOUT_S)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    secret = secret_file(tmp_path / "secret", OURS)
    (proven,) = await daemons.start("proven", 1, "--peer-secret-file", str(secret))
    credentials = PeerSecret(secret).current().for_dialling()
    options = [("grpc.ssl_target_name_override", NAME)]
    async with grpc.aio.secure_channel(proven.peer, credentials, options=options) as channel:
        assert "kvferry.v1.Peer" in await listed(channel)
    async with grpc.aio.insecure_channel(proven.peer) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await healthy(channel, "")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_ends_come_with_an_enum_beside_the_word(
    daemons: Daemons, daemon: DaemonService, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, request_id: str
) -> None:
    heard: list[engine_pb2.Event] = []
    on_event = EngineClient._on_event
    monkeypatch.setattr(EngineClient, "_on_event", lambda self, event: (heard.append(event), on_event(self, event)))
    (reading,) = await daemons.start("reading")
    (prefill, _), (decode, _) = await engine_on(stack, "p", daemon), await engine_on(stack, "d", reading)
    assert isinstance(prefill, TestEngine)
    kv, leases = await published(prefill, request_id)
    await decode.gets(request_id, kv, source=SourceBody(engine_id="p", address=daemon.peer))
    await leases[0].ended()
    (transfer,) = (event.transfer_ended for event in heard if event.HasField("transfer_ended"))
    (lease,) = (event.lease_ended for event in heard if event.HasField("lease_ended"))
    assert (transfer.state, transfer.transfer_state) == ("done", layout_pb2.TRANSFER_STATE_DONE)
    assert (lease.state, lease.lease_state) == ("released", layout_pb2.LEASE_STATE_RELEASED)
