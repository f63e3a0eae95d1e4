"""OpenTelemetry spans of transfers and leases, under the router's traceparent. Made from their records after the end.

They are made where OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set and the extra `otel` is installed; else
nothing of its SDK is imported. All other OTEL_* variables hold: sampling, headers, batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.protocol.values import Account
from kvferry.schemas import RankTransfer, Wait
from kvferry.threads import made as made_apart
from kvferryd.observe import logs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AttributeValue

log = logs.get(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PHASES = ("waiting", "connecting", "reading", "verifying")
"""In their order, from the transfer's beginning."""
FLUSH_S = 2.0


def made(instance: str) -> Spans | None:
    """None where nobody asked for spans, or the packages are missing, which is logged."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "no spans", why=str(error), remedy="pip install 'kvferry[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT"
        )
        return None
    about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "kvferry"), "service.instance.id": instance}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)


class Spans:
    """Owns the provider, whose thread sends them. `close` it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry")

    def transfer(
        self, share: RankTransfer, request_id: str, began: float, trace: logs.Trace, **about: AttributeValue
    ) -> None:
        """This rank's share, its phases below it, and its waits as events: where it waited for one thing several times,
        the event is at the first and has the length of all. began: Unix time."""
        about |= {"path": share.path, "bytes": share.bytes, "descriptors": share.descriptors, "rank": share.rank}
        error = share.error.code if share.error else ""
        total_ms = share.phases_ms.get("total", 0.0)
        phases = {name: share.phases_ms.get(name, 0.0) for name in PHASES}
        self._add("kvferry.transfer", request_id, trace, began, total_ms, about, phases, error, share.waits)

    def lease(self, engine_id: str, ended: Account) -> None:
        state, tokens = ended.state.value, ended.num_tokens
        about: dict[str, AttributeValue] = {
            "engine_id": engine_id, "lease": ended.number, "state": state, "tokens": tokens,
        }  # fmt: skip
        took_ms, trace = 1e3 * ended.age_s, logs.Trace(*ended.trace)
        self._add("kvferry.lease", ended.request_id, trace, ended.created_at, took_ms, about, {}, "")

    def _add(
        self, name: str, request_id: str, trace: logs.Trace, began: float, took_ms: float,
        about: Mapping[str, AttributeValue], phases: Mapping[str, float], error: str, waits: Sequence[Wait] = (),
    ) -> None:  # fmt: skip
        from opentelemetry import trace as otel

        named = _named({"request_id": request_id, **about})
        start, end = int(1e9 * began), int(1e9 * began + 1e6 * took_ms)
        above = otel.set_span_in_context(otel.NonRecordingSpan(_parent(trace, request_id)))
        span = self._tracer.start_span(name, above, start_time=start, attributes=named)
        below, at = otel.set_span_in_context(span), start
        for phase, ms in phases.items():
            if ms > 0:
                part = self._tracer.start_span(f"kvferry.{phase}", below, start_time=at)
                at = min(end, at + int(1e6 * ms))
                part.end(at)
        for wait in waits:
            told = {"what": wait.what.value, "on": wait.on, "part": wait.part, "ms": wait.ms}
            span.add_event("kvferry.wait", _named(told), timestamp=int(1e9 * wait.began_at))
        if error:
            span.set_status(otel.Status(otel.StatusCode.ERROR, error))
        span.end(end)

    async def close(self) -> None:
        """Send what is left, for FLUSH_S at most: the SDK waits for ten seconds and more, whatever it is told."""
        with contextlib.suppress(TimeoutError):
            await made_apart("spans", self._provider.shutdown, FLUSH_S)


def _named(about: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"kvferry.{key}": value for key, value in about.items()}


def _parent(trace: logs.Trace, request_id: str) -> SpanContext:
    """The router's span; without one a name that both sides make of the request's, so that theirs are one trace."""
    from opentelemetry.trace import SpanContext, TraceFlags

    if trace.traceparent:
        _, trace_id, span_id, flags = trace.traceparent.split("-")
    else:
        digest = hashlib.sha256(request_id.encode()).hexdigest()
        trace_id, span_id, flags = digest[:32], digest[32:48], "01"
    sampled = TraceFlags(int(flags, 16))
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled)
