"""The metrics that Prometheus reads at /metrics. Every name starts with kvferry_; docs/reference/metrics.md has the
table.

Counters and histograms count things as they end; gauges are set by the core before each scrape.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from http import HTTPMethod
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)  # fmt: skip
from prometheus_client.exposition import choose_encoder

from kvferry import __version__
from kvferry.schemas import FailedRequest, LeaseState, RankTransfer, TransferState

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BYTES = tuple(float(4**power << 10) for power in range(3, 14))
"""64 KiB to 64 GiB, by four."""
OTHER, NONE = "other", "none"
METHODS = frozenset(map(str, HTTPMethod))
"""HTTP's own: a caller may name any, also one that has no token."""
WAYS = (("direct", "UCX"), ("staged", "UCX"), ("staged", "cuda_ipc"), ("mapped", "cuda_ipc"))
"""Path and transport."""
FAILURES = (
    "aborted", "deadline", "engine_gone", "engine_taken", "lease_ended", "other_prompt", "other_weights",
    "peer_lost", "peer_unreachable", "proof_failed", "rank_failed", "rank_lost", "stale_epoch", "torn",
    "transport_failed",
)  # fmt: skip
REFUSALS = ("address_not_allowed", "draining", "full", "malformed_tables", "order_conflict", "unknown_engine")
"""Codes that are counted from 0 on, so that a rate sees the first of them. Others begin with their first."""
GAUGES = (
    ("transfers", "transfers held now, the history included", "state"),
    ("transfers_waiting", "transfers that move nothing, by what they wait for", "waits_for"),
    ("leases", "leases held now, those that have ended and are remembered included", "state"),
    ("live_readers", "peers that read from a lease now"),
    ("region_bytes", "registered cache memory", "ownership"),
    ("quarantined_bytes", "blocks that a read given up on may still write"),
    ("unfreed_bytes", "memory of sessions that are over, which could not be freed or may still be written"),
    ("staging_bytes", "size of the staging arena"),
    ("staging_used_bytes", "staging slots in use"),
    ("queue_depth", "waiting transfers (order or reservation to come) and waits for a staging slot"),
    ("queue_oldest_seconds", "age of the oldest transfer whose order or reservation is to come"),
    ("certificate_expiry_timestamp_seconds", "when a certificate of the tls_* files ends", "file"),
    ("peers", "peers with a finished handshake"),
    ("peers_failing", "daemons that do not answer or cannot be read now", "peer_engine", "rank"),
    (
        "last_failure_timestamp_seconds",
        "when the last request to read from an engine has failed, of 24 hours, also before a restart",
        "peer_engine",
        "code",
    ),
    ("engines_attached", "engine ranks with an open session"),
    ("draining", "1 while the daemon takes no new transfers"),
    ("ready", "1 while /readyz answers 200"),
)
"""Name, what it is, and its labels."""
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second line for each counter, which nobody reads


class Few:
    """Keeps a label's values few: the first `limit` distinct ones by name, all later ones as `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if not value:
            return NONE
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(value)
        return value


class Metrics:
    """The daemon's metrics on a registry of their own, so that several daemons fit into one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._peer, self._code = Few(64), Few(64)
        self._failing, self._failed, self._rank = Few(64), Few(64), Few(64)
        """Apart from `_peer`: engines that are well take no place from one that fails, nor do names in orders, of which
        there may be any number, from one that was met."""
        self._labelled: Callable[..., Any] = lru_cache(maxsize=4096)(lambda metric, *values: metric.labels(*values))
        """A metric of a family: `labels` itself checks and locks each time."""
        by_read = ("path", "transport", "peer_engine")

        build = Info("kvferry_build", "version of the daemon", registry=self.registry)
        build.info({"version": __version__, "python": platform.python_version()})
        counter = partial(Counter, namespace="kvferry", registry=self.registry)
        histogram = partial(Histogram, namespace="kvferry", registry=self.registry)
        self.ended = counter("transfers_ended", "this rank's share of transfers by its end", ["state", *by_read])
        self.failures = counter(
            "transfer_failures",
            "failed transfers by code; rank 0 counts those of other ranks where its own share is done",
            ["code", "peer_engine"],
        )
        self.read = counter("read_bytes", "bytes of done transfers", by_read)
        self.descriptors = counter("descriptors", "NIXL descriptors of done transfers", by_read)
        self.served = counter(
            "served_bytes", "bytes that others read here, as they say or as was packed", ["reader_engine"]
        )
        self.leases_ended = counter("leases_ended", "leases by how they ended", ["state"])
        self.handshakes = counter("handshakes", "handshakes with peers by outcome", ["outcome"])
        self.refused = counter("orders_refused", "orders that were not taken, by code", ["code"])
        self.phases = histogram(
            "transfer_phase_seconds", "time of transfers in each phase", ["phase", "path"], buckets=SECONDS
        )
        self.sizes = histogram("transfer_bytes", "size of done transfers", ["path"], buckets=BYTES)
        self.handshake_times = histogram("handshake_seconds", "time of handshakes", ["outcome"], buckets=SECONDS)
        self.peer_times = histogram(
            "peer_transfer_seconds", "time of done transfers by source engine, without the wait for their second half",
            ["peer_engine"], buckets=SECONDS,
        )  # fmt: skip
        self.rest_times = histogram(
            "rest_seconds", "time of REST calls; of those that wait for an end the route has ?wait",
            ["method", "route", "status"], buckets=SECONDS,
        )  # fmt: skip
        for code in FAILURES:
            self.failures.labels(code, NONE)
        for code in REFUSALS:
            self.refused.labels(code)
        for outcome in ("ok", "peer_unreachable"):
            self.handshakes.labels(outcome)
        for state in LeaseState:
            if state.ended:
                self.leases_ended.labels(state.value)

        self.gauges = {
            name: Gauge(name, what, labels, namespace="kvferry", registry=self.registry)
            for name, what, *labels in GAUGES
        }

    def known(self, peer_engine: str) -> None:
        """A peer is read from here for the first time: what is counted of it begins at 0."""
        peer = self._peer(peer_engine)
        for code in FAILURES:
            self.failures.labels(code, peer)
        for way in WAYS:
            self.ended.labels(TransferState.DONE.value, *way, peer)
            self.read.labels(*way, peer)
            self.descriptors.labels(*way, peer)

    def rest(self, method: str, route: str, status: int, seconds: float) -> None:
        self.rest_times.labels(method if method in METHODS else OTHER, route, str(status)).observe(seconds)

    def transfer_ended(self, share: RankTransfer, peer_engine: str) -> None:
        """Count this rank's share of a transfer at its end. Every rank's daemon counts its own; rank 0 also counts a
        share of another rank by which a request fails whose share here has not."""
        path, peer = share.path or NONE, self._peer(peer_engine)
        by_read = (path, share.transport or NONE, peer)
        of = self._labelled
        of(self.ended, share.state.value, *by_read).inc()
        if share.state is TransferState.DONE:
            of(self.read, *by_read).inc(share.bytes)
            of(self.descriptors, *by_read).inc(share.descriptors)
            of(self.sizes, path).observe(share.bytes)
            took_ms = share.phases_ms.get("total", 0.0) - share.phases_ms.get("waiting", 0.0)
            of(self.peer_times, peer).observe(took_ms / 1000)
        if share.error is not None:
            self.failures.labels(self._code(share.error.code), peer).inc()
        for phase, milliseconds in share.phases_ms.items():
            of(self.phases, phase, path).observe(milliseconds / 1000)

    def bytes_served(self, reader_engine: str, nbytes: int) -> None:
        self.served.labels(self._peer(reader_engine)).inc(nbytes)

    def lease_ended(self, state: LeaseState) -> None:
        self.leases_ended.labels(state.value).inc()

    def handshake(self, outcome: str, seconds: float) -> None:
        """outcome: `ok`, or the code of the error."""
        outcome = self._code(outcome)
        self.handshakes.labels(outcome).inc()
        self.handshake_times.labels(outcome).observe(seconds)

    def order_refused(self, code: str) -> None:
        self.refused.labels(self._code(code)).inc()

    def gauge(self, values: Mapping[str, float | Mapping[str, float]]) -> None:
        """As things stand now: by name, and by the label's value where a gauge has one."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                for label, number in value.items():
                    self.gauges[name].labels(label).set(number)
            else:
                self.gauges[name].set(value)

    def failing(self, ranks: Iterable[tuple[str, int | None]]) -> None:
        """The engine and rank of each daemon that fails now, empty and None for one that was never met."""
        gauge = self.gauges["peers_failing"]
        gauge.clear()
        for engine_id, rank in ranks:
            gauge.labels(self._failing(engine_id), self._rank("" if rank is None else str(rank))).inc()

    def failed(self, last: Iterable[FailedRequest]) -> None:
        """The last request that failed to read from each engine, the newest first."""
        gauge = self.gauges["last_failure_timestamp_seconds"]
        gauge.clear()
        for each in reversed(list(last)):  # the newest stays of those that share a label
            gauge.labels(self._failed(each.engine_id), self._code(each.error.code)).set(each.at)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) in the format that the scraper's Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def total(counter: Counter) -> int:
    """The sum over all its labels."""
    return int(
        sum(each.value for metric in counter.collect() for each in metric.samples if each.name.endswith("_total"))
    )
