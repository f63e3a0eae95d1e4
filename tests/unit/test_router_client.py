"""The router's client: its calls against a real daemon, its errors against answers byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry import router as router_module
from kvferry.errors import KvferryError, Refusal
from kvferry.manifest import Manifest
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, PeerRequest, SourceBody, Totals, TransferState
from kvferryd.demo.fleet import DaemonService, Fleet
from support import refused

ORDER = OrderBody(request_id="r/1 ä", source=SourceBody(engine_id="prefill", address="127.0.0.1:9"))
RECORD = {"transfer_id": "t", "request_id": "r", "engine_id": "e", "state": "reading"}


def manifest(heads: int = 2) -> Manifest:
    axes = [("block", 4, heads * 32), ("slot", 2, heads * 16), ("head", heads, 16), ("dim", 8, 2)]
    return Manifest.from_dict(
        {
            "engine_id": "e",
            "epoch": "1",
            "model": {"name": "m", "fingerprint": "f"},
            "regions": [{"id": 0, "kind": "host", "nbytes": 4096}],
            "groups": [{"name": "full", "block_size": 2, "num_blocks": 4}],
            "components": [
                {
                    "group": "full", "layer": 0, "name": "k", "dtype": "float16", "region": 0, "offset": 0,
                    "axes": [{"name": name, "extent": extent, "stride": stride} for name, extent, stride in axes],
                    "shard": {"axis": "head", "start": 0, "total": heads},
                }
            ],
        }
    )  # fmt: skip


# against a real daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonService]:
    fleet = Fleet()
    try:
        service = fleet.daemon("alone")
        asyncio.run(fleet.ready(service, timeout_s=60))
        yield service
    finally:
        fleet.close()


def ask(daemon: DaemonService, question: Callable[[RouterClient], Awaitable[Any]]) -> Any:
    async def asked() -> Any:
        async with RouterClient(daemon.url) as client:
            return await question(client)

    return asyncio.run(asked())


def test_a_daemon_tells_what_it_is(daemon: DaemonService) -> None:
    assert ask(daemon, RouterClient.healthy) is True
    assert ask(daemon, RouterClient.info).peer == daemon.peer
    readiness = ask(daemon, RouterClient.ready)
    assert (readiness.ready, len(readiness.reasons) > 0) == (False, True)
    assert ask(daemon, RouterClient.drain_status).draining is False


def test_an_idle_daemon_has_nothing_to_list(daemon: DaemonService) -> None:
    for question in (RouterClient.transfers, RouterClient.leases, RouterClient.peers, RouterClient.engines):
        assert ask(daemon, question) == []
    assert ask(daemon, lambda client: client.transfers("r", TransferState.DONE, wait_s=0.1)) == []


@pytest.mark.parametrize(
    ("question", "code", "status"),
    [
        (lambda client: client.transfer("no such one"), "unknown_transfer", 404),
        (lambda client: client.wait("none", timeout_s=1), "unknown_transfer", 404),
        (lambda client: client.abort_transfer("none"), "unknown_transfer", 404),
        (lambda client: client.revoke_lease("no/such one"), "unknown_lease", 404),
        (lambda client: client.forget_peer("none"), "unknown_peer", 404),
        (lambda client: client.order(ORDER), "unknown_engine", 404),
        (lambda client: client.prewarm(PeerRequest(engine_id="x", address="192.0.2.1:9")), "unknown_engine", 404),
    ],
)
def test_what_a_daemon_refuses_arrives_with_its_code_and_remedy(
    question: Callable[[RouterClient], Awaitable[Any]], code: str, status: int, daemon: DaemonService
) -> None:
    with refused(code, DaemonError, status=status):
        ask(daemon, question)


def test_aborting_what_is_not_there_is_no_error(daemon: DaemonService) -> None:
    result = ask(daemon, lambda client: client.abort_request("r/1 ä"))
    assert (result.transfers_ended, result.leases_ended) == (0, 0)


def test_explain_tells_a_plan_or_raises_the_refusals(daemon: DaemonService) -> None:
    explanation = ask(daemon, lambda client: client.explain([manifest()], manifest()))
    assert explanation.run_bytes
    with pytest.raises(KvferryError) as raised:
        ask(daemon, lambda client: client.explain([manifest(heads=2)], manifest(heads=4)))
    assert raised.value.refusals[0].component == "0.k"


def test_a_drained_daemon_says_so(daemon: DaemonService) -> None:
    """The last of this file to use the daemon: it takes no more orders."""
    assert ask(daemon, lambda client: client.drain(wait_s=1)).drained is True
    assert ask(daemon, RouterClient.ready).ready is False


# against answers byte by byte


RESET = b"reset"


@asynccontextmanager
async def answering(*answers: bytes, hold: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A canned answer per connection; an empty one closes it, RESET resets it. Yields the URL and the requests."""
    left, requests = list(answers), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        requests.append(head + await reader.readexactly(length))
        if hold:
            await reader.read()
        if (answer := left.pop(0) if left else b"") == RESET:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


def http(status: int, body: object, headers: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(content)}\r\n\r\n".encode() + content


async def failure(*answers: bytes, hold: bool = False, timeout_s: float = 5.0) -> DaemonError:
    async with answering(*answers, hold=hold) as (url, _), RouterClient(url, timeout_s=timeout_s) as client:
        with pytest.raises(DaemonError) as raised:
            await client.order(ORDER)
        return raised.value


def test_a_problem_becomes_an_error_with_all_its_fields() -> None:
    refusal = {"code": "dtype", "component": "3.k", "source": "float16", "destination": "bfloat16"}
    problem = {
        "title": "Too Many Requests", "status": 429, "detail": "no slot is free", "code": "full", "field": "f",
        "value": "v", "remedy": "wait", "refusals": [refusal], "of_a_newer_daemon": 1,
    }  # fmt: skip
    error = asyncio.run(failure(http(429, problem, "retry-after: 2\r\n")))
    assert (error.code, error.message, error.field, error.value, error.remedy) == (
        "full", "no slot is free", "f", "v", "wait",
    )  # fmt: skip
    assert (error.status, error.retry_after_s) == (429, 2.0)
    assert error.refusals == (Refusal("dtype", "3.k", "float16", "bfloat16"),)


@pytest.mark.parametrize("status", [200, 202, 404, 500])
@pytest.mark.parametrize("body", [b"<html>nginx</html>", b"", b"[]", b'{"transfer_id": 3}', b"[" * 50_000])
def test_an_answer_that_is_not_a_daemons_is_called_that(status: int, body: bytes) -> None:
    error = asyncio.run(failure(http(status, body)))
    assert (error.code, error.status) == ("malformed_answer", status)
    assert error.remedy


@pytest.mark.parametrize("closed", [b"", RESET], ids=["at its end", "by a reset"])
def test_an_order_whose_connection_the_daemon_has_closed_meanwhile_is_sent_again(closed: bytes) -> None:
    """A reset comes where the daemon had closed before the order was on its way."""

    async def ordered() -> list[bytes]:
        ordered = http(202, {"transfer_id": "t", "state": "waiting"})
        async with answering(closed, ordered) as (url, requests), RouterClient(url) as client:
            assert (await client.order(ORDER)).transfer_id == "t"
            return requests

    first, again = asyncio.run(ordered())
    assert first == again


async def unanswered(url: str) -> DaemonError:
    async with RouterClient(url, timeout_s=2) as client:
        assert await client.healthy() is False
        with pytest.raises(DaemonError) as raised:
            await client.order(ORDER)
        return raised.value


def test_nobody_there_is_daemon_unreachable() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # another process cannot listen there meanwhile
        error = asyncio.run(unanswered(f"http://127.0.0.1:{held.getsockname()[1]}"))
    assert (error.code, error.status) == ("daemon_unreachable", 0)
    assert "kvferry serve" in error.remedy


@pytest.mark.parametrize("url", ["http://[::1", "http://h:x", "http://\ud800:1", "http://h/\ud800", "http://\0:1"])
def test_an_address_that_is_none_is_refused_by_name(url: str) -> None:
    error = asyncio.run(unanswered(url))
    assert (error.code, error.field) == ("malformed_url", "url")


def test_a_daemon_that_hangs_is_given_up_after_the_timeout_and_named() -> None:
    error = asyncio.run(failure(hold=True, timeout_s=0.2))
    assert error.code == "daemon_timeout"
    assert error.value.startswith("http://127.0.0.1:")
    assert f"the daemon at {error.value} did not answer" in error.message


def test_a_client_opens_no_more_connections_than_a_daemon_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "CONNECTIONS", 1)

    async def twice() -> tuple[DaemonError, int]:
        async with answering(hold=True) as (url, requests), RouterClient(url) as client:
            first = asyncio.create_task(client.transfers(wait_s=60))
            async with asyncio.timeout(60):
                while not requests:  # noqa: ASYNC110  nothing else tells that it has the connection
                    await asyncio.sleep(0.01)
            client.timeout_s = 0.4
            with refused("client_full", DaemonError) as full:
                await client.transfers(wait_s=60)
            first.cancel()
            await asyncio.wait([first])
            return full.value, len(requests)

    second, asked = asyncio.run(twice())
    assert asked == 1 and "all 1 connections" in second.message and second.remedy


def test_a_call_lost_on_a_closing_connection_is_sent_once_more() -> None:
    async def lost(*answers: bytes) -> tuple[str, int]:
        async with answering(*answers) as (url, requests), RouterClient(url, timeout_s=5) as client:
            try:
                return (await client.order(ORDER)).transfer_id, len(requests)
            except DaemonError as error:
                return error.code, len(requests)

    assert asyncio.run(lost(b"", http(202, {"transfer_id": "t", "state": "waiting"}))) == ("t", 2)
    assert asyncio.run(lost(b"", b"", b"")) == ("daemon_unreachable", 2)


def test_an_order_carries_token_trace_and_body() -> None:
    async def order() -> bytes:
        accepted = http(202, {"transfer_id": "t", "state": "waiting"})
        async with answering(accepted) as (url, requests), RouterClient(url, token="secret") as client:
            ordered = await client.order(ORDER, traceparent="00-ab-cd-01")
            assert (ordered.transfer_id, ordered.state) == ("t", TransferState.WAITING)
            return requests[0]

    head, _, body = asyncio.run(order()).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/transfers HTTP/1.1")
    assert b"\r\nauthorization: bearer secret" in head.lower()
    assert b"\r\ntraceparent: 00-ab-cd-01" in head.lower()
    said = json.loads(body)
    assert said.pop("order_id"), "an order that is sent again could not be told from another"
    assert said == {
        "request_id": "r/1 ä", "priority": 0, "source": {"engine_id": "prefill", "address": "127.0.0.1:9"},
    }  # fmt: skip


def test_wait_polls_until_the_end_or_the_timeout() -> None:
    async def waited(*states: str, timeout_s: float) -> tuple[TransferState, list[bytes]]:
        answers = [http(200, RECORD | {"state": state}) for state in states]
        async with answering(*answers) as (url, requests), RouterClient(url) as client:
            record = await client.wait("t", timeout_s=timeout_s)
            return record.state, requests

    state, requests = asyncio.run(waited("reading", "verifying", "done", timeout_s=45))
    assert (state, len(requests)) == (TransferState.DONE, 3)
    assert requests[0].startswith(b"GET /v1/transfers/t?wait=30.000 ")
    state, requests = asyncio.run(waited("reading", timeout_s=0))
    assert (state, len(requests)) == (TransferState.READING, 1)


def test_a_drain_is_waited_for_in_calls_that_a_daemon_takes() -> None:
    async def drained(*answers: dict[str, object]) -> tuple[bool, list[float]]:
        said = [http(200, {"leases": 1, "transfers": 0, "drained": False} | answer) for answer in answers]
        async with answering(*said) as (url, requests), RouterClient(url) as client:
            left = await client.drain(wait_s=9000)
            return left.drained, [json.loads(each.partition(b"\r\n\r\n")[2])["wait_s"] for each in requests]

    drains, done = {"draining": True}, {"draining": True, "drained": True}
    assert asyncio.run(drained(drains, drains, drains)) == (False, [3600, 3600, 1800])
    assert asyncio.run(drained(drains, done)) == (True, [3600, 3600])
    assert asyncio.run(drained({"draining": False})) == (False, [3600]), "cancelled: it must not begin again"


def test_totals_of_an_earlier_daemon_are_read() -> None:
    """They lack what has come since: daemons are upgraded one after another."""
    nbytes = (f"{what}_bytes" for what in ("quarantined", "unfreed", "staging", "staging_used", "read", "served"))
    said = dict.fromkeys(("live_readers", "queue", *nbytes), 0) | {"transfers": {}, "waiting": {}, "leases": {}}

    async def totals() -> Totals:
        async with answering(http(200, said)) as (url, _), RouterClient(url) as client:
            return await client.totals()

    assert asyncio.run(totals()).readiness is None


def test_calls_of_a_client_that_is_closed_say_so(daemon: DaemonService) -> None:
    async def late() -> None:
        async with RouterClient(daemon.url) as client:
            assert await client.healthy() is True
        assert await client.healthy() is False
        with refused("client_closed", DaemonError):
            await client.order(ORDER)

    asyncio.run(late())


def test_a_body_that_is_wrong_is_an_error_of_ours_with_field_value_and_remedy() -> None:
    with pytest.raises(KvferryError) as wrong:
        SourceBody(engine_id="prefill", address="prefill")
    assert str(wrong.value) == (
        "SourceBody.address is not host:port (SourceBody.address = prefill)"
        " -> write host:port, with brackets round an IPv6 address"
    )
    with refused("malformed_request", field="OrderBody.request_id") as wrong:
        OrderBody(request_id="", source=SourceBody(engine_id="prefill", address="h:1"))
