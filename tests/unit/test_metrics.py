"""What is counted, under which labels, and that labels stay few."""

from __future__ import annotations

import pytest

from kvferry.schemas import ErrorBody, LeaseState, RankTransfer, TransferState
from kvferryd.config import Config
from kvferryd.ferry import Ferry
from kvferryd.metrics import Few, Metrics

pytestmark = pytest.mark.anyio


def text(metrics: Metrics) -> str:
    return metrics.exposition()[0].decode()


def share(state: TransferState, error: ErrorBody | None = None) -> RankTransfer:
    return RankTransfer(
        rank=0, state=state, bytes=1 << 20, descriptors=3, path="staged", transport="UCX",
        phases_ms={"reading": 20.0, "total": 21.0}, error=error,
    )  # fmt: skip


def test_a_done_transfer_is_counted_with_its_bytes_and_phases() -> None:
    metrics = Metrics()
    metrics.transfer_ended(share(TransferState.DONE), "prefill")
    said = text(metrics)
    labels = 'path="staged",peer_engine="prefill",'
    assert f'kvferry_transfers_ended_total{{{labels}state="done",transport="UCX"}} 1.0' in said
    assert f'kvferry_read_bytes_total{{{labels}transport="UCX"}} 1.048576e+06' in said
    assert 'kvferry_transfer_phase_seconds_bucket{le="0.025",path="staged",phase="reading"} 1.0' in said


def test_a_failed_transfer_is_counted_by_code_and_its_bytes_are_not() -> None:
    metrics = Metrics()
    metrics.transfer_ended(share(TransferState.FAILED, ErrorBody(code="deadline", message="")), "")
    said = text(metrics)
    assert 'kvferry_transfer_failures_total{code="deadline",peer_engine="none"} 1.0' in said
    assert "kvferry_read_bytes_total{" not in said


async def test_gauges_are_set_at_each_scrape_and_every_state_is_there() -> None:
    ferry = Ferry(Config(), Metrics())
    lines = ferry.scrape()[0].decode().splitlines()
    for state in (*TransferState, *LeaseState):
        kind = "transfers" if isinstance(state, TransferState) else "leases"
        assert f'kvferry_{kind}{{state="{state.value}"}} 0.0' in lines
    for ownership in ("owned", "adopted"):
        assert f'kvferry_region_bytes{{ownership="{ownership}"}} 0.0' in lines
    assert {"kvferry_draining 0.0", "kvferry_ready 0.0"} <= set(lines)
    await ferry.drain(0)
    assert "kvferry_draining 1.0" in ferry.scrape()[0].decode().splitlines()
    await ferry.close()


def test_two_daemons_fit_into_one_process() -> None:
    first, second = Metrics(), Metrics()
    first.handshake("ok", 0.1)
    first.lease_ended(LeaseState.EXPIRED)
    first.order_refused("full")
    assert 'kvferry_handshakes_total{outcome="ok"} 1.0' in text(first)
    assert "kvferry_handshakes_total{" not in text(second)


def test_a_label_takes_only_so_many_values() -> None:
    few = Few(2)
    assert [few(value) for value in ("a", "b", "c", "", "a")] == ["a", "b", "other", "none", "a"]
