"""The counts, their labels, and that labels stay few."""

from __future__ import annotations

import pytest

from kvferry.schemas import ErrorBody, FailedRequest, LeaseState, RankTransfer, TransferState
from kvferryd.config import Config
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import FAILURES, REFUSALS, WAYS, Few, Metrics
from kvferryd.paths.move import PathName, Transport

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
    await ferry.drain(0, "a test")
    assert "kvferry_draining 1.0" in ferry.scrape()[0].decode().splitlines()
    await ferry.close()


def test_two_daemons_fit_into_one_process() -> None:
    first, second = Metrics(), Metrics()
    first.handshake("ok", 0.1)
    first.lease_ended(LeaseState.EXPIRED)
    first.order_refused("full")
    assert 'kvferry_handshakes_total{outcome="ok"} 1.0' in text(first)
    assert 'kvferry_handshakes_total{outcome="ok"} 0.0' in text(second)


def test_what_is_known_is_counted_from_0_so_that_a_rate_sees_the_first() -> None:
    metrics = Metrics()
    metrics.known("prefill")
    said = text(metrics)
    for state in LeaseState:
        assert (f'kvferry_leases_ended_total{{state="{state.value}"}} 0.0' in said) is state.ended
    for code in REFUSALS:
        assert f'kvferry_orders_refused_total{{code="{code}"}} 0.0' in said
    for code in FAILURES:
        assert f'kvferry_transfer_failures_total{{code="{code}",peer_engine="prefill"}} 0.0' in said
    for path, transport in WAYS:
        labels = f'path="{path}",peer_engine="prefill",transport="{transport}"'
        assert f"kvferry_read_bytes_total{{{labels}}} 0.0" in said
    assert {path for path, _ in WAYS} == set(PathName) and {transport for _, transport in WAYS} == set(Transport)


def test_no_series_says_only_when_another_was_made() -> None:
    metrics = Metrics()
    metrics.transfer_ended(share(TransferState.DONE), "prefill")
    assert "_created" not in text(metrics)
    assert "_created" not in metrics.exposition("application/openmetrics-text; version=1.0.0")[0].decode()


def test_a_peers_latency_has_no_wait_for_the_router() -> None:
    metrics = Metrics()
    ended = share(TransferState.DONE)
    ended.phases_ms |= {"waiting": 4000.0, "total": 4021.0}
    metrics.transfer_ended(ended, "prefill")
    assert 'kvferry_peer_transfer_seconds_bucket{le="0.025",peer_engine="prefill"} 1.0' in text(metrics)


def test_a_label_takes_only_so_many_values() -> None:
    few = Few(2)
    assert [few(value) for value in ("a", "b", "c", "", "a")] == ["a", "b", "other", "none", "a"]


def test_what_fails_now_is_named_and_has_no_line_when_it_is_well_again() -> None:
    metrics = Metrics()
    metrics.failing([("prefill", 1), ("", None), ("", None), *(("many", rank) for rank in range(100))])
    said = text(metrics)
    assert 'kvferry_peers_failing{peer_engine="prefill",rank="1"} 1.0' in said
    assert 'kvferry_peers_failing{peer_engine="none",rank="none"} 2.0' in said
    assert 'kvferry_peers_failing{peer_engine="many",rank="other"} 36.0' in said
    metrics.failing([])
    assert "kvferry_peers_failing{" not in text(metrics)


def test_the_last_failure_of_each_engine_is_told_until_it_is_forgotten() -> None:
    def failed(engine_id: str, at: float) -> FailedRequest:
        return FailedRequest(at=at, request_id="r", engine_id=engine_id, error=ErrorBody(code="deadline", message="m"))

    metrics = Metrics()
    metrics.failed(failed(f"engine {n}", 1000.0 - n) for n in range(100))
    said = text(metrics)
    name = "kvferry_last_failure_timestamp_seconds"
    assert f'{name}{{code="deadline",peer_engine="engine 99"}} 901.0' in said
    assert f'{name}{{code="deadline",peer_engine="other"}} 1000.0' in said, "the newest of the others"
    assert said.count(f"{name}{{") == 65
    metrics.failed([])
    assert f"{name}{{" not in text(metrics)
    metrics.failing([("met", 0)])
    assert 'kvferry_peers_failing{peer_engine="met",rank="0"} 1.0' in text(metrics), "names in orders took no place"


def test_methods_that_are_none_of_https_are_one_label() -> None:
    metrics = Metrics()
    for method in ("GET", "DELETE", "ANY", "OTHER"):
        metrics.rest(method, "/healthz", 405, 0.1)
    counted = {
        line.partition("{")[2] for line in text(metrics).splitlines() if line.startswith("kvferry_rest_seconds_c")
    }
    assert {labels.split('"')[1] for labels in counted} == {"GET", "DELETE", "other"}
