"""Probes and metrics say what is so."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx
import pytest
from fleet import Daemons
from lives import TP1, engine_on, published
from pair import Pair
from prometheus_client.parser import text_string_to_metric_families
from ranks import STATE_NBYTES, TOKEN_NBYTES, Kv

from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import LeaseState, OrderBody, SourceBody

pytestmark = pytest.mark.anyio


async def test_probes_and_metrics_say_what_is_so(
    pair: Pair, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("observed")
    router = await stack.enter_async_context(RouterClient(daemon.url))
    http = await stack.enter_async_context(httpx.AsyncClient(base_url=daemon.url, trust_env=False))
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    unready = await http.get("/readyz")
    assert (unready.status_code, unready.json()["reasons"]) == (503, ["no engine has registered its cache"])

    engine, _ = await engine_on(stack, "observed", daemon)
    assert (await http.get("/readyz")).status_code == 200
    said = await metrics(http)
    assert said["kvferry_ready", ()] == said["kvferry_engines_attached", ()] == 1
    assert said["kvferry_region_bytes", (("ownership", "owned"),)] == TP1.nbytes(0)
    assert said["kvferry_peers", ()] == 0

    _, leases = await published(engine, f"{request_id}-out")
    assert (await metrics(http))["kvferry_leases", (("state", "published"),)] == 1
    await engine.ranks[0].client.abort(f"{request_id}-out")
    assert await leases[0].ended() is LeaseState.REVOKED

    kv = Kv.random(50)
    source = pair.prefill.take(50)
    pair.prefill.write(kv, source)
    await pair.prefill.publish(request_id, source, 50)
    await engine.gets(request_id, kv, source=pair.prefill.source())
    await engine.outcomes(f"{request_id}-late", engine.take(50), deadline_s=0.05)
    with pytest.raises(DaemonError):
        await router.order(OrderBody(request_id="x", source=SourceBody(engine_id="prefill", address="192.0.2.1:7411")))
    said = await metrics(http)
    labels = (("path", "direct"), ("peer_engine", "prefill"), ("transport", "UCX"))
    assert said["kvferry_read_bytes_total", labels] == 50 * TOKEN_NBYTES + STATE_NBYTES
    assert said["kvferry_transfers_ended_total", (*labels[:2], ("state", "done"), labels[2])] == 1
    assert said["kvferry_leases_ended_total", (("state", "revoked"),)] == 1
    assert said["kvferry_handshakes_total", (("outcome", "ok"),)] == 1
    assert said["kvferry_orders_refused_total", (("code", "address_not_allowed"),)] == 1
    assert said["kvferry_peers", ()] == 2
    assert said["kvferry_live_readers", ()] == said["kvferry_quarantined_bytes", ()] == 0
    failed = [own for (name, own), count in said.items() if name == "kvferry_transfer_failures_total" and count]
    assert any(("code", "deadline") in own for own in failed)
    assert said["kvferry_peer_transfer_seconds_count", (("peer_engine", "prefill"),)] == 1
    call = (("method", "POST"), ("route", "/v1/transfers"), ("status", "403"))
    assert said["kvferry_rest_seconds_count", call] == 1
    assert said["kvferry_queue_oldest_seconds", ()] == 0


async def metrics(http: httpx.AsyncClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
