"""The proxy over real HTTP, in front of stand-ins for other people's engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from foreign_engine import STREAM, ForeignEngine, engine, events, leaves, served

from kvferry.proxy import Endpoint, Options, main, parse
from kvferry.proxy.app import build_app
from kvferryd.demo.fleet import Fleet, Service
from support import refused

PROMPT = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


@contextmanager
def proxy(prefill: list[ForeignEngine | str], *decode: ForeignEngine | str, **options: Any) -> Iterator[httpx.Client]:
    def endpoint(side: ForeignEngine | str) -> Endpoint:
        return Endpoint(side if isinstance(side, str) else side.url)

    chosen = Options(prefill=tuple(map(endpoint, prefill)), decode=tuple(map(endpoint, decode)), **options)
    with served(build_app(chosen)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def prefill() -> Iterator[ForeignEngine]:
    with engine() as foreign:
        yield foreign


@pytest.fixture
def decode() -> Iterator[ForeignEngine]:
    with engine() as foreign:
        yield foreign


@pytest.fixture
def client(prefill: ForeignEngine, decode: ForeignEngine) -> Iterator[httpx.Client]:
    with proxy([prefill], decode) as http:
        yield http


@pytest.fixture
def dead() -> Iterator[str]:
    """A port that is ours but where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


# the two legs


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_is_asked_for_one_token_and_decode_gets_the_original_body(
    path: str, client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    body = PROMPT | {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3, "own": {"x": 1.5}}
    client.post(path, json=body, headers={"X-Request-Id": "r-1", "traceparent": "00-ab-cd-01"})
    (first,), (second,) = prefill.seen, decode.seen
    assert first.path == second.path == path
    assert first.body == {key: value for key, value in body.items() if key != "stream_options"} | {
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert second.body == body | {"kv_transfer_params": prefill.params}
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    for leg in (first, second):
        assert re.fullmatch("r-1-[0-9a-f]{16}", leg.headers["x-request-id"])
        assert leg.headers["traceparent"] == "00-ab-cd-01"


def test_the_stream_of_decode_reaches_the_client_byte_for_byte(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=PROMPT | {"stream": True}, headers={"X-Request-Id": "r-2"})
    assert answer.content == b"".join(STREAM)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "r-2"


def test_the_first_bytes_of_a_stream_do_not_wait_for_the_rest(client: httpx.Client, decode: ForeignEngine) -> None:
    decode.pause.clear()
    with client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer:
        stream = answer.iter_raw()
        assert next(stream).startswith(STREAM[0])
        decode.pause.set()
        assert b"".join(stream).endswith(STREAM[-1])


def test_an_answer_that_is_not_streamed_is_passed_on_unchanged(client: httpx.Client, decode: ForeignEngine) -> None:
    answer = client.post("/v1/completions", json=PROMPT)
    assert answer.content == b'{"choices": [{"text":   "abc"}]}'
    assert len(answer.headers["x-request-id"]) == 32
    assert decode.seen[0].headers["x-request-id"] == answer.headers["x-request-id"]


def test_a_client_cannot_bring_its_own_coordinates(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    prefill.params = None  # published nothing: decode computes the prompt itself
    with proxy([prefill], decode) as client:
        own = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.9.9.9"}}
        body = PROMPT | own | {"vllm_xargs": own | {"other": 1}}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert prefill.seen[0].body["vllm_xargs"] == {"other": 1}
    assert decode.seen[0].body == PROMPT | {"vllm_xargs": {"other": 1}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_a_cookie_is_that_clients_alone_to_whom_it_was_given(
    path: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    prefill.cookie = decode.cookie = "session=alices"
    method, body = ("GET", None) if path == "/v1/models" else ("POST", PROMPT)
    with proxy([prefill], decode) as alice, httpx.Client(base_url=alice.base_url) as bob:
        first = alice.request(method, path, json=body, headers={"Cookie": "name=alice"})
        assert first.headers["set-cookie"] == "session=alices"
        bob.request(method, path, json=body)
    alices, bobs = zip(*(engine.seen for engine in (prefill, decode) if engine.seen), strict=True)
    assert {leg.headers.get("cookie") for leg in alices} == {"name=alice"}
    assert {leg.headers.get("cookie") for leg in bobs} == {None}


ODD_HEADERS = [(b"x-name", "中".encode()), (b"x-name", b"\xff"), (b"x-name", b"a")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
@pytest.mark.parametrize("order", ["engine", "router"])
def test_headers_of_any_bytes_pass_as_they_are_also_when_they_repeat(
    path: str, order: str, dead: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    prefill.raw_headers = decode.raw_headers = ODD_HEADERS
    prefill.params = {
        "remote_engine_id": "p", "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 9,
    }  # fmt: skip
    method, body = ("GET", None) if path == "/v1/models" else ("POST", PROMPT)
    ordering = Options(prefill=(Endpoint(prefill.url),), decode=(Endpoint(decode.url, (dead,)),), order=order)
    with served(build_app(ordering)) as url, httpx.Client(base_url=url, timeout=60) as client:
        headers = [*ODD_HEADERS, (b"traceparent", b"\xff")]
        answer = client.request(method, path, json=body, headers=headers)
    if order == "engine" or method == "GET":
        assert answer.status_code == 200
        assert [pair for pair in answer.headers.raw if pair[0] == b"x-name"] == ODD_HEADERS
    else:
        assert answer.json()["error"]["code"] == "daemon_unreachable"  # and no other
    for leg in (*prefill.seen, *decode.seen):
        assert [pair for pair in leg.raw_headers if pair[0] == b"x-name"] == ODD_HEADERS


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_headers_that_are_named_as_those_of_one_connection_end_with_it(
    path: str, client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    theirs = [(b"connection", b"x-theirs, X-Too"), (b"x-theirs", b"1"), (b"x-too", b"1")]
    prefill.raw_headers = decode.raw_headers = theirs
    method, body = ("GET", None) if path == "/v1/models" else ("POST", PROMPT)
    headers = {"Connection": "keep-alive, X-Ours", "X-Ours": "1", "X-All": "1"}
    answer = client.request(method, path, json=body, headers=headers)
    assert answer.status_code == 200
    assert not answer.headers.keys() & {"x-theirs", "x-too"}
    for leg in (*prefill.seen, *decode.seen):
        assert (leg.headers.get("x-ours"), leg.headers.get("x-all")) == (None, "1")


def test_a_proxy_starts_whatever_certificates_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not there concerns nobody: settings of the environment are for the world outside."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    build_app(Options(prefill=(Endpoint("http://h:1"),), decode=(Endpoint("http://h:2", ("http://h:3",)),)))


def test_a_daemon_of_a_large_fleet_is_asked_on_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has 120 addresses of this host, each a daemon to the proxy, which asks each of them every 3.75 s."""
    monkeypatch.setattr("kvferry.proxy.fleet.PATIENCE_S", 60.0)  # a call that is given up ends its connection
    monkeypatch.setattr("kvferry.proxy.exchange.ABORT_TIMEOUT_S", 60.0)
    monkeypatch.setattr("kvferry.router.KEPT_S", 600.0)  # so does a long pause, on a machine that stands still
    asked: defaultdict[str, list[int]] = defaultdict(list)
    count, twice, app = 120, threading.Event(), FastAPI()

    @app.get("/{rest:path}")
    async def answer(request: Request) -> Response:
        assert request.client is not None
        asked[request.scope["server"][0]].append(request.client.port)
        if len(asked) == count and min(map(len, asked.values())) > 1:
            twice.set()
        return Response(status_code=404)

    with served(app, "0.0.0.0", timeout_keep_alive=600) as server:
        port = httpx.URL(server).port
        daemons = tuple(f"http://127.0.0.{1 + i}:{port}" for i in range(count))
        engines = {"prefill": (Endpoint("http://127.0.0.1:1"),), "decode": (Endpoint("http://127.0.0.1:2", daemons),)}
        with served(build_app(Options(**engines, fleet=True))) as url:
            for _ in range(60):
                assert httpx.get(f"{url}/v1/fleet", timeout=60).status_code == 200
                if twice.wait(1):
                    break
    assert twice.is_set()
    assert {len(set(ports)) for ports in asked.values()} == {1}


# choosing engines, retrying


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_an_error_of_prefill_is_the_clients_answer(
    status: int, client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    prefill.statuses = [status]
    answer = client.post("/v1/completions", json=PROMPT)
    assert (answer.status_code, answer.json()) == (status, {"error": {"message": f"no: {status}"}})
    assert answer.headers["x-engine"] == prefill.url
    assert len(prefill.seen) == 1
    assert not decode.seen


@pytest.mark.parametrize("status", [502, 503, 504])
def test_another_prefill_is_tried_when_one_is_overloaded(
    status: int, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    prefill.statuses = [status]
    with engine() as other, proxy([prefill, other], decode) as client:
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        assert len(prefill.seen) == len(other.seen) == 1


def test_retries_are_bounded_and_end_with_the_last_answer(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(engine()) for _ in range(3)]
        for foreign in (prefill, *others):
            foreign.statuses = [503] * 9
        client = stack.enter_context(proxy([prefill, *others], decode, prefill_attempts=2))
        assert client.post("/v1/completions", json=PROMPT).json() == {"error": {"message": "no: 503"}}
        assert [len(foreign.seen) for foreign in (prefill, *others)] == [1, 1, 0, 0]


def test_a_dead_prefill_is_passed_over(dead: str, prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with proxy([dead, prefill], decode) as client:
        assert [client.post("/v1/completions", json=PROMPT).status_code for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_decode_may_compute_alone_when_no_prefill_engine_answers(
    stream: bool, dead: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    prefill.statuses = [503]
    body = PROMPT | {"stream": stream}
    with proxy([dead, prefill], decode, when_no_prefill="recompute") as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        assert decode.seen[0].body == body, "no coordinates"
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200
        assert decode.seen[1].body == body | {"kv_transfer_params": prefill.params}, "it is asked again"
    with proxy([dead], decode, when_no_prefill="recompute") as client:
        assert client.get("/health").status_code == 200
    with proxy([dead], decode) as client:
        assert client.post("/v1/completions", json=body).json()["error"]["code"] == "engine_unreachable"
        assert client.get("/health").status_code == 503
    assert len(decode.seen) == 2


@pytest.fixture
def hanging(prefill: ForeignEngine) -> Iterator[ForeignEngine]:
    """A prefill engine that takes requests and never answers."""
    prefill.hold.clear()
    yield prefill
    prefill.hold.set()


def test_a_prefill_engine_that_hangs_leaves_the_others_their_time(
    hanging: ForeignEngine, decode: ForeignEngine
) -> None:
    with engine() as other, proxy([hanging, other], decode, prefill_timeout_s=5.0) as client:
        answer = client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 200, answer.text
        assert (len(hanging.seen), len(other.seen)) == (1, 1)
        assert hanging.left.wait(60)
    assert decode.seen[0].body["kv_transfer_params"] == other.params


@pytest.mark.parametrize("when_no_prefill", ["refuse", "recompute"])
def test_when_every_prefill_engine_hangs_the_policy_decides(
    when_no_prefill: str, hanging: ForeignEngine, decode: ForeignEngine
) -> None:
    with proxy([hanging], decode, prefill_timeout_s=0.5, when_no_prefill=when_no_prefill) as client:
        answer = client.post("/v1/completions", json=PROMPT)
    if when_no_prefill == "recompute":
        assert answer.status_code == 200 and decode.seen[0].body == PROMPT
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        assert hanging.url in answer.json()["error"]["message"]


@pytest.mark.parametrize("status", [400, 429, 500])
def test_a_prefill_engine_that_refuses_has_answered(status: int, prefill: ForeignEngine, decode: ForeignEngine) -> None:
    prefill.statuses = [status]
    with proxy([prefill], decode, when_no_prefill="recompute") as client:
        assert client.post("/v1/completions", json=PROMPT).status_code == status
    assert not decode.seen


def test_prefill_engines_take_turns(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with engine() as other, proxy([prefill, other], decode) as client:
        for _ in range(4):
            client.post("/v1/completions", json=PROMPT)
        assert len(prefill.seen) == len(other.seen) == 2


def test_a_header_names_the_prefill_and_strangers_are_forbidden(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with engine() as other, proxy([prefill, other], decode) as client:

        def ask(named: str) -> httpx.Response:
            return client.post("/v1/completions", json=PROMPT, headers={"x-prefiller-host-port": named})

        assert [ask(other.host_port).status_code for _ in range(3)] == [200] * 3
        assert (len(prefill.seen), len(other.seen)) == (0, 3)
        assert ask(f"{prefill.host_port}, {other.host_port}").status_code == 200
        refused = ask(f"{prefill.host_port},169.254.169.254:80")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "prefiller_not_allowed")
        assert len(prefill.seen) + len(other.seen) == 4


# incoming requests are checked


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b" " * 2000, 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/models", b"", 200),
        ("GET", "/health", b"", 200),
    ],
)
def test_every_answer_has_an_id(
    method: str, path: str, content: bytes, status: int, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    with proxy([prefill], decode, max_body_mb=0.001) as client:
        for own in ("r-1", "x" * 256):
            answer = client.request(method, path, content=content, headers={"X-Request-Id": own})
            assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, [own])
        assert re.fullmatch("[0-9a-f]{32}", client.request(method, path, content=content).headers["x-request-id"])


def test_an_id_that_is_no_name_is_not_repeated(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "a b"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request_id")
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"temperature": NaN}', b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}", b'{"temperature": 1e999}', b'{"temperature": -' + b"9" * 5000 + b".0}",
    ],
    ids=["empty", "cut", "array", "string", "bytes", "nan", "deep", "long number", "infinite", "long and infinite"],
)  # fmt: skip
def test_a_body_that_is_no_json_object_gets_a_clean_400(content: bytes, client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, "malformed_json", "invalid_request_error")


def test_half_a_character_passes_as_it_came(
    client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    content = rb'{"prompt": "\ud800 \u00e4", "n": 1}'
    assert client.post("/v1/completions", content=content).status_code == 200
    for (leg,) in (prefill.seen, decode.seen):
        assert leg.body["prompt"] == "\ud800 \u00e4"
        assert leg.headers["content-type"] == "application/json"
        assert int(leg.headers["content-length"]) == leg.nbytes


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_of_several_prompts_the_first_is_prefilled_and_decode_gets_all(
    client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine, prompts: list[object]
) -> None:
    assert client.post("/v1/completions", json=PROMPT | {"prompt": prompts}).status_code == 200
    assert prefill.seen[-1].body["prompt"] == prompts[0]
    assert decode.seen[-1].body == PROMPT | {"prompt": prompts, "kv_transfer_params": prefill.params}


def test_a_body_too_large_is_refused(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with proxy([prefill], decode, max_body_mb=0.001) as client:
        assert client.post("/v1/completions", content=b" " * 2000).status_code == 413


def test_requests_of_one_id_travel_under_ids_of_their_own(
    client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    decode.hold.clear()

    def ask() -> httpx.Response:
        return client.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "x" * 256})

    with ThreadPoolExecutor() as threads:
        first = threads.submit(ask)
        assert decode.arrived.wait(60)
        decode.hold.set()
        answers = [first.result(), ask()]
    assert [(answer.status_code, answer.headers["x-request-id"]) for answer in answers] == [(200, "x" * 256)] * 2
    ids = [seen.headers["x-request-id"] for seen in decode.seen]
    assert ids == [seen.headers["x-request-id"] for seen in prefill.seen]
    assert len(set(ids)) == 2
    assert all(len(request_id) == 145 for request_id in ids)


def test_with_a_token_only_its_bearers_come_in_and_it_stays_here(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with proxy([prefill], decode, api_token="secret") as client:
        for given, why in (
            ({}, "this proxy asks for a bearer token"),
            ({"Authorization": "secret"}, "this proxy asks for a bearer token"),
            ({"Authorization": "Bearer wrong"}, "the token is not this proxy's"),
        ):
            refused = client.post("/v1/completions", json=PROMPT, headers=given)
            assert refused.status_code == 401 and why in refused.text
        answer = client.post("/v1/completions", json=PROMPT, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert "authorization" not in prefill.seen[0].headers | decode.seen[0].headers


def test_without_a_token_the_clients_authorization_is_for_the_engines(
    client: httpx.Client, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    client.post("/v1/completions", json=PROMPT, headers={"Authorization": "Bearer engine-key"})
    assert prefill.seen[0].headers["authorization"] == decode.seen[0].headers["authorization"] == "Bearer engine-key"


# when decode fails, when the client leaves


def test_a_refusal_of_decode_is_the_clients_answer(client: httpx.Client, decode: ForeignEngine) -> None:
    decode.statuses = [429]
    answer = client.post("/v1/completions", json=PROMPT | {"stream": True})
    assert (answer.status_code, answer.json()) == (429, {"error": {"message": "no: 429"}})


def test_a_dead_decode_is_a_502_that_names_it(dead: str, prefill: ForeignEngine) -> None:
    with proxy([prefill], dead) as client:
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_unreachable")
        assert dead in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_another_decode_engine_is_asked_where_one_is_down(
    stream: bool, dead: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    body = PROMPT | {"stream": stream}
    with engine() as other, proxy([prefill], dead, decode, other) as client:
        answers = [client.post("/v1/completions", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len(decode.seen) + len(other.seen) == 3
    assert all(seen.body == body | {"kv_transfer_params": prefill.params} for seen in decode.seen)
    assert len(prefill.seen) == 3, "a prompt is prefilled once"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_another_decode_engine_is_asked_where_one_is_overloaded(
    status: int, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    decode.statuses = [status]
    with engine() as other, proxy([prefill], decode, other) as client:
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        assert len(decode.seen) == len(other.seen) == 1


def test_another_decode_engine_is_asked_where_a_daemon_has_no_connection_left(
    monkeypatch: pytest.MonkeyPatch, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    """An order that was not sent holds nothing there."""
    monkeypatch.setattr("kvferry.router.CONNECTIONS", 0)
    monkeypatch.setattr("kvferry.proxy.exchange.ABORT_TIMEOUT_S", 0.2)
    prefill.params = {
        "remote_request_id": "lease-1", "remote_num_tokens": 9, "remote_engine_id": "p", "remote_host": "127.0.0.1",
        "remote_port": 9,
    }  # fmt: skip
    decode.hold.clear()
    with engine() as other:
        decodes = tuple(Endpoint(each.url, (f"{each.url}/daemon",)) for each in (decode, other))
        other.hold.clear()
        with served(build_app(Options(prefill=(Endpoint(prefill.url),), decode=decodes, order="router"))) as url:
            answer = httpx.post(f"{url}/v1/completions", json=PROMPT, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "client_full")
        assert decode.arrived.is_set() and other.arrived.is_set()
        decode.hold.set()
        other.hold.set()


def test_tries_of_decode_are_bounded_and_end_with_the_last_answer(prefill: ForeignEngine) -> None:
    with ExitStack() as stack:
        decodes = [stack.enter_context(engine(statuses=[503] * 9)) for _ in range(3)]
        client = stack.enter_context(proxy([prefill], *decodes, decode_attempts=2))
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.json()) == (503, {"error": {"message": "no: 503"}})
        assert answer.headers["x-engine"] == decodes[1].url
        assert [len(decode.seen) for decode in decodes] == [1, 1, 0]


def test_a_stream_that_has_begun_is_not_asked_for_again(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    decode.breaks = True
    with (
        engine() as other,
        proxy([prefill], decode, other) as client,
        client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        answer.read()
    assert not other.seen


def test_a_stream_that_breaks_is_never_taken_for_a_whole_one(client: httpx.Client, decode: ForeignEngine) -> None:
    decode.breaks = True
    received: list[bytes] = []
    with (
        client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        received.extend(answer.iter_raw())
    assert b"[DONE]" not in b"".join(received)
    assert events(b"".join(received))[-1]["error"]["code"] == "engine_unreachable"


def test_a_slow_engine_is_a_504(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    with proxy([prefill], decode, decode_timeout_s=5.0) as client:
        assert client.post("/v1/completions", json=PROMPT).status_code == 200  # all are connected
        decode.hold.clear()
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        assert decode.left.wait(60)


@pytest.mark.parametrize("stream", [True, False])
def test_decode_learns_that_the_client_left(stream: bool, client: httpx.Client, decode: ForeignEngine) -> None:
    (decode.pause if stream else decode.hold).clear()
    if stream:
        with client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer:
            next(answer.iter_raw())
    else:
        leaves(str(client.base_url.join("/v1/completions")), lambda: decode.arrived.wait(60), json=PROMPT)
    assert decode.left.wait(60)


def test_what_a_request_holds_is_freed_when_the_proxy_stops_before_its_answer(
    dead: str, prefill: ForeignEngine, decode: ForeignEngine, caplog: pytest.LogCaptureFixture
) -> None:
    decode.hold.clear()
    beside = Options(prefill=(Endpoint(prefill.url, (dead,)),), decode=(Endpoint(decode.url),))
    with ThreadPoolExecutor() as threads, served(build_app(beside), timeout_graceful_shutdown=1) as url:
        asking = threads.submit(httpx.post, f"{url}/v1/completions", json=PROMPT, timeout=60)
        assert decode.arrived.wait(60)
    assert asking.result().status_code == 500
    assert f"lease-1: not aborted at {dead}" in caplog.text and "no daemon answers" in caplog.text, "it was asked"


def test_prefill_learns_that_the_client_left(client: httpx.Client, prefill: ForeignEngine) -> None:
    prefill.hold.clear()
    leaves(str(client.base_url.join("/v1/completions")), lambda: prefill.arrived.wait(60), json=PROMPT)
    assert prefill.left.wait(60)


def test_a_client_that_reads_nothing_is_let_go_and_decode_with_it(
    prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    decode.filling = bytes(1 << 20)
    decode.pause.clear()
    fleet = Fleet()
    try:
        proxy = fleet.proxy(prefill, decode)
        asyncio.run(fleet.ready(proxy, timeout_s=60))
        content = json.dumps(PROMPT | {"stream": True}).encode()
        url = httpx.URL(proxy.url)
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(content) + content
            )
            assert decode.left.wait(60)
    finally:
        fleet.close()


OWN = """\
import sys
from kvferry import listening, proxy
from kvferry.proxy import app
listening.HEADER_S, app.UNSENT_S = map(float, sys.argv[1:3])
sys.exit(proxy.main(sys.argv[3:]))
"""


@contextmanager
def own_process(
    prefill: ForeignEngine,
    decode: ForeignEngine,
    before: Callable[[], object] = lambda: None,
    stderr: int | None = None,
    flags: Sequence[str] = (),
    header_s: float = 60.0,
    unsent_s: float = 60.0,
) -> Iterator[httpx.URL]:
    """The command. before: called in the process before it begins. header_s, unsent_s: how long it waits for the header
    of a request, and for the next part of its body."""
    fleet = Fleet()
    port = fleet.free_port()
    flags = [f"--listen=127.0.0.1:{port}", f"--prefill={prefill.url}", f"--decode={decode.url}", *flags]
    command = [sys.executable, "-c", OWN, str(header_s), str(unsent_s), *flags]
    with closing(fleet), subprocess.Popen(command, preexec_fn=before, stderr=stderr) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(
                fleet.ready(Service("proxy", url, "/healthz", process, fleet.directory / "no.log"), timeout_s=60)
            )
            yield httpx.URL(url)
        finally:
            process.terminate()
            try:
                status = process.wait(60)
            finally:
                process.kill()
            assert status in (0, -signal.SIGTERM)


def test_after_sigterm_an_answer_may_take_as_long_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: seen.append(server.config.timeout_graceful_shutdown))
    assert main(["--prefill=h:1", "--decode=h:2", "--decode-timeout=700.5"]) == 0
    assert seen == [701]


NEWER = """\
import asyncio, sys
from kvferry.proxy import main

async def wait_closed(server):
    while server._active_count:
        await asyncio.sleep(0.01)

sys.modules["uvloop"] = None  # which may be there, and does not wait
if sys.version_info < (3, 12):
    asyncio.Server.wait_closed = wait_closed
sys.exit(main())
"""


class Newer(Fleet):
    """Its proxies wait for connections when they stop, as asyncio does from Python 3.12 on."""

    def _start(self, name: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        return super()._start(name, [sys.executable, "-c", NEWER, *command[3:]])


def test_a_second_signal_waits_for_no_answer(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    decode.hold.clear()
    fleet = Newer()
    try:
        proxy = fleet.proxy(prefill, decode)
        asyncio.run(fleet.ready(proxy, timeout_s=60))
        with ThreadPoolExecutor() as threads:
            asking = threads.submit(httpx.post, f"{proxy.url}/v1/completions", json=PROMPT, timeout=120)
            assert decode.arrived.wait(60)
            proxy.signal(signal.SIGTERM)
            with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
                while True:  # until it takes nothing new
                    httpx.get(f"{proxy.url}/healthz", timeout=60)
            proxy.signal(signal.SIGTERM)
            proxy.process.wait(60)
            with pytest.raises(httpx.TransportError):
                asking.result()
    finally:
        fleet.close()


def test_an_idle_connection_is_kept_as_long_as_is_set(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    """And no longer; the time for a header, which is less here, does not count after the first."""
    with (
        own_process(prefill, decode, flags=["--keep-alive=2"], header_s=1.5) as url,
        socket.create_connection((url.host, url.port)) as client,
    ):
        client.settimeout(30)
        began = time.monotonic()
        client.sendall(b"HEAD /healthz HTTP/1.1\r\nhost: h\r\n\r\n")
        assert client.recv(1 << 16)
        assert client.recv(1 << 16) == b""
        assert time.monotonic() - began >= 2


def test_a_log_that_nobody_reads_holds_up_no_request(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    reading, writing = os.pipe()
    try:
        with own_process(prefill, decode, stderr=writing) as url:
            os.set_blocking(writing, False)
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, bytes(1 << 12))
            os.set_blocking(writing, True)  # for the proxy, whose pipe it is as well
            with httpx.Client(base_url=url, timeout=20) as client:
                for number in range(5):
                    decode.statuses = [200, 400][number % 2 :][:1]
                    assert client.post("/v1/completions", json=PROMPT).status_code == [200, 400][number % 2]
                assert client.post("/v1/completions", content=b"{").status_code == 400
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_proxy_without_standard_descriptors_writes_its_log_to_no_connection(
    closed: str, prefill: ForeignEngine, decode: ForeignEngine, own_fleet: Fleet
) -> None:
    port = own_fleet.free_port()
    flags = f"--listen=127.0.0.1:{port} --prefill={prefill.url} --decode={decode.url}"
    command = f'exec "$0" -m kvferry.proxy {flags} {closed}'
    with subprocess.Popen(["sh", "-c", command, sys.executable]) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=7), base_url=f"http://127.0.0.1:{port}") as client:
                assert client.get("/healthz").is_success
                answer = client.post("/v1/completions", json=PROMPT | {"stream": True})
            assert answer.content == b"".join(STREAM)
            assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
        finally:
            process.terminate()
            assert process.wait(60) in (0, -signal.SIGTERM)


def test_many_streams_at_one_time_do_not_run_out_of_file_handles(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    """The usual limit of a shell, 1,024, was reached with 400 of them: all failed then. Here it is 64."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))

    decode.pause.clear()
    with own_process(prefill, decode, few) as url:

        async def one(http: httpx.AsyncClient, begun: asyncio.Semaphore) -> bytes:
            whole = b""
            async with http.stream("POST", url.join("/v1/completions"), json=PROMPT | {"stream": True}) as answer:
                begun.release()
                async for part in answer.aiter_raw():
                    whole += part
            return whole

        async def all_of_them(count: int) -> list[bytes]:
            begun = asyncio.Semaphore(0)
            async with httpx.AsyncClient(timeout=60) as http, asyncio.TaskGroup() as tasks:
                streams = [tasks.create_task(one(http, begun)) for _ in range(count)]
                for _ in range(count):
                    await begun.acquire()
                decode.pause.set()
            return [each.result() for each in streams]

        answers = asyncio.run(all_of_them(50))
    assert all(answer.endswith(STREAM[-1]) for answer in answers)


@pytest.mark.parametrize(
    ("sent", "answer", "patience"),
    [
        (b"", b"", {"header_s": 0.3}),
        (b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n", b"", {"header_s": 0.3}),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{",
            b"HTTP/1.1 408 ",
            {"unsent_s": 0.3},
        ),
    ],
)
def test_a_client_that_does_not_send_its_request_is_let_go(
    sent: bytes, answer: bytes, patience: dict[str, float], prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    with own_process(prefill, decode, **patience) as url, socket.create_connection((url.host, url.port)) as client:
        client.settimeout(30)
        client.sendall(sent)
        said = b""
        while part := client.recv(1 << 16):
            said += part
    assert said.startswith(answer) and bool(said) == bool(answer)
    assert not answer or b'"code":"body_timeout"' in said


@pytest.mark.parametrize("when_no_prefill", ["refuse", "recompute"])
def test_a_proxy_whose_connections_are_all_in_use_says_so(
    when_no_prefill: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    """No engine is down then."""
    decode.pause.clear()
    limits = {"max_connections": 1, "connect_timeout_s": 0.2}
    with (
        proxy([prefill], decode, when_no_prefill=when_no_prefill, **limits) as client,
        client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as first,
    ):
        assert first.status_code == 200
        with httpx.Client(base_url=client.base_url) as other:
            refused = other.post("/v1/completions", json=PROMPT)
        decode.pause.set()
        assert first.read().endswith(STREAM[-1])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "full")
    assert len(prefill.seen) == 1, "it asked no engine"


# beside the requests


def test_models_come_from_an_engine_and_health_asks_all(
    dead: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    with proxy([dead, prefill], decode) as client:
        assert client.get("/v1/models").json()["data"] == [{"id": "m"}]
        health = client.get("/health")
        assert health.status_code == 200
        assert health.json()["engines"] == {dead: "down", prefill.url: "ok", decode.url: "ok"}
    with proxy([dead], decode) as client:
        assert client.get("/health").status_code == 503
        assert client.get("/healthz").status_code == 200


def test_flags_are_read_and_their_faults_explained(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--prefill", "h:1,daemon=h:2,daemon=h:3", "--decode", "https://d", "--listen", "[::]:80"])
    assert options.prefill == (Endpoint("http://h:1", ("http://h:2", "http://h:3")),)
    assert (options.decode[0].host_port, options.host, options.port) == ("d:443", "::", 80)
    for wrong, told in {
        "--order router --prefill h:1 --decode h:2": "daemon=http://",
        "--prefill h:1/v1 --decode h:2": "/v1",
        "--prefill h:1,nonsense=3 --decode h:2": "daemon=",
        "--prefill h:1 --decode h:2 --listen 80": "host:port",
        "--prefill h:1 --decode h:2 --api-token-file /nonexistent": "token",
        "--prefill h:1 --decode h:2 --daemon-tls-ca ca.pem": "--daemon-tls-cert, --daemon-tls-key and --daemon-tls-ca",
        "--prefill h:1 --decode h:2 --daemon-tls-cert /no --daemon-tls-key /no --daemon-tls-ca /no": "No such file",
        "--decode h:2": "--prefill",
        "--prefill h:1 --decode h:2 --keep-alive 0.4": "--keep-alive: Input should be a valid integer",
        "--prefill h:1 --decode h:2 --keep-alive 0": "--keep-alive: Input should be greater than 0",
    }.items():
        with refused(2, SystemExit):
            parse(wrong.split())
        assert told in capsys.readouterr().err


def test_params_that_cannot_be_ordered_from_are_a_clean_error(prefill: ForeignEngine, decode: ForeignEngine) -> None:
    prefill.params = "not an object"
    with proxy([prefill], decode) as client:
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "malformed_kv_transfer_params")
    assert not decode.seen
    assert json.loads(answer.content)


@pytest.mark.parametrize(
    "params",
    [r'{"remote_request_id": "\ud800"}', r'{"\ud800": 1}', '{"other": NaN}', '{"other": -1e999}'],
    ids=["half a character", "in a name", "nan", "infinite"],
)
def test_params_that_decode_cannot_be_sent_are_a_clean_error(
    params: str, prefill: ForeignEngine, decode: ForeignEngine
) -> None:
    prefill.answer = f'{{"kv_transfer_params": {params}}}'
    with proxy([prefill], decode) as client:
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "malformed_kv_transfer_params")
    assert not decode.seen


@pytest.mark.parametrize(
    ("name", "said"), [("a-1/b:2%", "a-1/b:2%"), ("\u4e2d", "%E4%B8%AD"), ("a\r\nx: 1", "a%0D%0Ax:%201")]
)
def test_any_name_of_a_lease_is_told_in_a_header(
    name: str, said: str, client: httpx.Client, prefill: ForeignEngine
) -> None:
    prefill.params = {"remote_request_id": name}
    assert client.post("/v1/completions", json=PROMPT).headers["x-kvferry-request-id"] == said
