"""Spans of a transfer and of its lease arrive under the router's span, from both sides."""

from __future__ import annotations

import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fleet import Daemons, until
from lives import engine_on, published
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvferry.engine import TransferFailed
from kvferry.protocol.lease import Lease
from kvferry.protocol.values import Terms
from kvferry.schemas import OrderBody
from kvferryd.observe import spans

pytestmark = pytest.mark.anyio


class Collector(ThreadingHTTPServer):
    """The receiver in place of OpenTelemetry's collector."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []

    def of(self, trace_id: str) -> dict[str, Span]:
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace_id}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        told = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in told.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield server
        server.shutdown()
        serving.join()


async def test_both_sides_of_a_request_are_below_the_routers_span_and_a_failure_is_one_of_its_own(
    collector: Collector, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (source,), (reader,) = await daemons.start("span-p"), await daemons.start("span-d")
    prefill, _ = await engine_on(stack, "span-prefill", source)
    decode, router = await engine_on(stack, "span-decode", reader)
    kv, _ = await published(prefill, request_id)
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    order = OrderBody(request_id=request_id, source=prefill.source())
    await router.order(order, traceparent=f"00-{trace_id}-{span_id}-01")
    await decode.receive(request_id, decode.take(kv.tokens))

    wanted = {"kvferry.transfer", "kvferry.connecting", "kvferry.reading", "kvferry.lease"}

    async def arrived() -> bool:
        return wanted <= collector.of(trace_id).keys()

    await until(arrived, "both sides send their spans")
    told = collector.of(trace_id)
    transfer, reading = told["kvferry.transfer"], told["kvferry.reading"]
    assert transfer.parent_span_id.hex() == told["kvferry.lease"].parent_span_id.hex() == span_id
    assert reading.parent_span_id == transfer.span_id
    assert transfer.start_time_unix_nano <= reading.start_time_unix_nano <= reading.end_time_unix_nano
    assert reading.end_time_unix_nano <= transfer.end_time_unix_nano
    about, of_lease = ({each.key: each.value for each in span.attributes} for span in (transfer, told["kvferry.lease"]))
    assert about["kvferry.request_id"].string_value == request_id
    assert about["kvferry.source"].string_value == "span-prefill"
    assert about["kvferry.attempt"].int_value == 1
    assert about["kvferry.lease"].int_value == of_lease["kvferry.lease"].int_value == 1

    (outcome,) = await decode.outcomes(f"{request_id}-late", decode.take(1), deadline_s=0.05)
    assert isinstance(outcome, TransferFailed)

    def failures() -> list[Span]:
        return [span for span in list(collector.spans) if span.status.message == "deadline"]

    async def failed() -> bool:
        return bool(failures())

    await until(failed, "a failure is sent, as a span with an error and a trace of its own")
    (late,) = failures()
    (waited,) = late.events
    said = {each.key: each.value for each in waited.attributes}
    assert waited.name == "kvferry.wait"
    assert (said["kvferry.what"].string_value, said["kvferry.on"].string_value) == ("order", "router")
    waited_ns = 1e6 * said["kvferry.ms"].double_value
    assert 0 < waited_ns <= late.end_time_unix_nano - late.start_time_unix_nano + 1e3, "no wait outlives its transfer"
    assert waited_ns <= late.end_time_unix_nano - waited.time_unix_nano + 1e6, "it begins at a whole millisecond"
    assert not any(span.status.message for span in collector.of(trace_id).values())


async def test_a_collector_that_does_not_answer_keeps_no_daemon_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits for it, however short it is told to: whoever closes the spans does not."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        made = spans.made("x")
        assert made is not None
        made.lease("e", Lease(Terms("r", 1, word=7, ttl_s=60, readers=1), 0.0).account(1.0))
        await made.close()
        with listening.accept()[0] as silent:
            poll = select.poll()
            poll.register(silent, select.POLLRDHUP)
            assert not poll.poll(0), "it was waited for until it was given up"


def test_without_an_endpoint_no_sdk_is_imported() -> None:
    script = (
        "import sys; from kvferryd.observe import spans; from kvferryd.process import serve;"
        "assert spans.made('x') is None;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=None)
    assert done.stdout.strip() == "[]"


def test_missing_packages_are_told_and_the_daemon_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    script = (
        "import sys; sys.modules['opentelemetry.sdk'] = None;"
        "from kvferryd.observe import spans; assert spans.made('x') is None"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'kvferry[otel]'" in done.stdout + done.stderr
