"""The REST application over the real core, in this process: errors, limits, tokens, and what it says of itself."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferryd.api.rest import page
from kvferryd.api.rest.app import create_app
from kvferryd.api.rest.gate import MAX_BODY, TokenFile
from kvferryd.config import Config
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics

ORDER = {"request_id": "r1", "source": {"engine_id": "prefill", "address": "127.0.0.1:7411"}}


@asynccontextmanager
async def daemon(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics()
    ferry = Ferry(Config(**settings), metrics)
    app = httpx.ASGITransport(create_app(ferry))
    try:
        async with httpx.AsyncClient(transport=app, base_url="http://daemon") as client:
            yield client
    finally:
        await ferry.close()


def asked(ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], **settings: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with daemon(**settings) as client:
            return await ask(client)

    return asyncio.run(run())


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Every error is problem+json with these members; returns it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert (body["status"], body["code"]) == (status, code)
    assert body["title"]
    assert body["detail"]
    return body


def post(path: str, body: object, **more: Any) -> httpx.Response:
    return asked(lambda client: client.post(path, json=body, **more))


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({**ORDER, "request_id": ""}, "request_id", "at least 1 character"),
        ({"request_id": "r1"}, "source", "is missing"),
        ({**ORDER, "prio": 1}, "prio", "is not known"),
        ({**ORDER, "priority": 101}, "priority", "less than or equal to 100"),
        ({**ORDER, "deadline_ms": 0}, "deadline_ms", "greater than or equal to 1"),
        ({**ORDER, "source": {**ORDER["source"], "address": "here"}}, "source.address", "malformed"),  # type: ignore[dict-item]
        ([], "body", "dictionary"),
        ("order", "body", "dictionary"),
    ],
)
def test_a_malformed_order_is_told_by_field_and_remedy(body: object, field: str, said: str) -> None:
    fault = problem(post("/v1/transfers", body), 422, "malformed_request")
    assert fault["field"] == field
    assert said in fault["detail"]
    assert fault["remedy"]


def test_several_faults_are_told_together() -> None:
    fault = problem(post("/v1/transfers", {"request_id": "", "priority": "x"}), 422, "malformed_request")
    assert "3 faults" in fault["detail"]


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"request_id": ' + b"9" * 5000 + b"}", b"{'a': 1}"]
)
def test_what_is_not_json_is_told(content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = asked(lambda client: client.post("/v1/transfers", content=content, headers=headers))
    problem(answer, 422, "malformed_json")


def test_what_is_echoed_may_hold_anything() -> None:
    content = b'{"request_id": "\\ud800", "source": {"engine_id": "\\u0000", "address": "\\udfff"}, "priority": NaN}'
    headers = {"content-type": "application/json"}
    answer = asked(lambda client: client.post("/v1/transfers", content=content, headers=headers))
    problem(answer, 422, "malformed_request")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_is_not_declared_as_json_is_refused(kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = asked(lambda client: client.post("/v1/transfers", content=json.dumps(ORDER), headers=headers))
    assert problem(answer, 415, "unsupported_media_type")["remedy"] == "send Content-Type: application/json"


def test_a_body_that_is_too_large_is_refused_declared_or_chunked() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    for content in (b" " * (MAX_BODY + 1), chunks()):
        answer = asked(lambda client, content=content: client.post("/v1/explain", content=content, headers=headers))  # type: ignore[misc]
        problem(answer, 413, "body_too_large")


def test_unknown_routes_and_methods_are_problems_too() -> None:
    problem(asked(lambda client: client.get("/v2/transfers")), 404, "no_such_route")
    problem(asked(lambda client: client.get("/docs")), 404, "no_such_route")
    problem(asked(lambda client: client.get("/v1/transfers/")), 404, "no_such_route")
    answer = asked(lambda client: client.put("/v1/transfers/1"))
    assert "it takes DELETE, GET" in problem(answer, 405, "method_not_allowed")["remedy"]
    assert answer.headers["allow"] == "DELETE, GET"


def test_what_is_not_here_is_404() -> None:
    for method, path, code in [
        ("GET", "/v1/transfers/none", "unknown_transfer"),
        ("GET", "/v1/transfers/none?wait=5", "unknown_transfer"),
        ("DELETE", "/v1/transfers/none", "unknown_transfer"),
        ("DELETE", "/v1/leases/a/b", "unknown_lease"),
        ("DELETE", "/v1/peers/none", "unknown_peer"),
        ("DELETE", "/v1/peers?engine_id=none", "unknown_peer"),
    ]:
        problem(asked(lambda client, m=method, p=path: client.request(m, p)), 404, code)  # type: ignore[misc]
    problem(post("/v1/transfers", ORDER), 404, "unknown_engine")


@pytest.mark.parametrize(
    "query", ["wait=-1", "wait=nan", "wait=inf", "wait=x", "state=moving", "request_id=", "wait=3"]
)
def test_a_malformed_query_is_told(query: str) -> None:
    fault = problem(asked(lambda client: client.get(f"/v1/transfers?{query}")), 422, "malformed_request")
    assert fault["field"] == query.partition("=")[0]


@pytest.mark.parametrize(
    "query",
    ["span_s=0", "span_s=86401", "step_s=90", "step_s=0", "since=-1", "since=1.7976931348623157e308", "peers=2"],
)
def test_a_malformed_question_for_the_history_is_told(query: str) -> None:
    fault = problem(asked(lambda client: client.get(f"/v1/history?{query}")), 422, "malformed_request")
    assert fault["field"] == query.partition("=")[0]


def test_empty_lists_are_answers() -> None:
    for path, body in [
        ("/v1/transfers", {"transfers": []}),
        ("/v1/transfers?request_id=r1&wait=0.01", {"transfers": []}),
        ("/v1/leases", {"leases": []}),
        ("/v1/peers", {"peers": []}),
        ("/v1/engines", {"engines": []}),
        ("/v1/drain", {"draining": False, "leases": 0, "transfers": 0, "drained": False}),
        ("/healthz", {"status": "ok"}),
    ]:
        answer = asked(lambda client, path=path: client.get(path))  # type: ignore[misc]
        assert answer.status_code == 200
        assert body.items() <= answer.json().items()


def test_aborting_a_request_that_is_not_here_ends_nothing_and_is_no_error() -> None:
    answer = asked(lambda client: client.post("/v1/requests/chat%2F1/abort"))
    assert (answer.status_code, answer.json()) == (200, {"transfers_ended": 0, "leases_ended": 0})


def test_not_ready_is_503_with_the_reasons() -> None:
    answer = asked(lambda client: client.get("/readyz"))
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    assert "no engine has registered" in answer.json()["reasons"][0]


def test_an_idle_daemon_is_drained_at_once_and_takes_no_orders_then() -> None:
    async def run() -> None:
        async with daemon() as client:
            assert (await client.post("/v1/drain", json={"wait_s": 30})).json()["drained"]
            assert (await client.post("/v1/drain")).json()["draining"]
            assert "draining" in (await client.get("/readyz")).json()["reasons"]

    asyncio.run(run())


def test_metrics_are_prometheus_text() -> None:
    answer = asked(lambda client: client.get("/metrics"))
    assert answer.headers["content-type"].startswith("text/plain")
    assert "kvferry_ready 0.0" in answer.text
    assert 'kvferry_transfers{state="reading"} 0.0' in answer.text
    accept = {"accept": "application/openmetrics-text"}
    assert asked(lambda client: client.get("/metrics", headers=accept)).text.endswith("# EOF\n")


def test_an_order_that_is_refused_is_counted() -> None:
    async def run() -> str:
        async with daemon() as client:
            await client.post("/v1/transfers", json=ORDER)
            return (await client.get("/metrics")).text

    assert 'kvferry_orders_refused_total{code="unknown_engine"} 1.0' in asyncio.run(run())


def test_a_token_opens_everything_and_without_it_only_probes_and_the_empty_page_answer(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\nnew-token\n")

    async def run() -> None:
        async with daemon(token_file=file) as client:
            for path in ("/healthz", "/readyz", *page.FILES):
                assert (await client.get(path)).status_code != 401
            for path in ("/v1/info", "/v1/transfers", "/metrics", "/openapi.json", "/nowhere"):
                refused = await client.get(path)
                assert problem(refused, 401, "unauthorized")["detail"] == "this daemon asks for a bearer token"
                assert refused.headers["www-authenticate"].startswith("Bearer")
            wrong = await client.get("/v1/info", headers={"authorization": "Bearer wrong"})
            assert problem(wrong, 401, "unauthorized")["detail"] == "the token is none of this daemon's"
            for value in ("Bearer wrong", "Bearer ", "new-token", "Basic new-token", "Bearer \xff", "Bearer old\nnew"):
                raw = {"authorization": value.encode("latin-1")}
                assert (await client.get("/v1/info", headers=raw)).status_code == 401  # type: ignore[arg-type]
            for value in ("Bearer old", "bearer new-token"):
                assert (await client.get("/v1/info", headers={"authorization": value})).status_code == 200

    asyncio.run(run())


def test_a_token_file_is_read_again_and_lets_nobody_in_while_it_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    tokens = TokenFile(file)
    assert tokens.accepts("one")
    renewed = tmp_path / "renewed"
    renewed.write_text("two")
    os.replace(renewed, file)
    assert (tokens.accepts("one"), tokens.accepts("two")) == (False, True)
    file.unlink()
    assert not tokens.accepts("two")
    assert not tokens.accepts("")
    file.write_text("three")
    assert tokens.accepts("three")


def test_a_request_keeps_its_name_and_gets_one_where_it_has_none() -> None:
    given = asked(lambda client: client.get("/healthz", headers={"x-request-id": "r-7"}))
    assert given.headers["x-request-id"] == "r-7"
    for bad in ("", "a b", "x" * 257):
        named = asked(lambda client, bad=bad: client.get("/nowhere", headers={"x-request-id": bad}))  # type: ignore[misc]
        assert len(named.headers["x-request-id"]) == 32


def test_a_page_of_another_origin_cannot_change_anything() -> None:
    origin = {"origin": "http://elsewhere"}
    problem(asked(lambda client: client.post("/v1/drain", headers=origin)), 403, "cross_origin")
    for host in ("127.0.0.1:7410", "[::1]:7410", "localhost:7410"):
        own = {"origin": f"http://{host}", "host": host}
        assert asked(lambda client, own=own: client.post("/v1/drain", headers=own)).status_code == 200


def test_a_name_that_leads_here_does_not_make_a_page_ours() -> None:
    """The name's owner decides where it leads: a browser would think the page and this daemon one origin."""
    rebound = {"origin": "http://rebound.example:7410", "host": "rebound.example:7410"}
    problem(asked(lambda client: client.post("/v1/drain", headers=rebound)), 403, "cross_origin")
    no_url = {"origin": "http://[x", "host": "[x"}
    problem(asked(lambda client: client.post("/v1/drain", headers=no_url)), 403, "cross_origin")
    program = {"host": "kvferry.example:7410"}
    assert asked(lambda client: client.post("/v1/drain", headers=program)).status_code == 200
