"""Decode asks who prefills at an address that a request names: addresses that are silent cost nobody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvferry.schemas import SourceBody
from kvferry.sglang import bootstrap
from kvferry.sglang.answer import answer
from kvferry.sglang.bootstrap import ASK_S, ASKS, GLANCE_S, MOST_NBYTES, PATH, Prefill, Sources
from kvferryd.demo.fleet import Fleet

PREFILL = Prefill(
    sources=[SourceBody(engine_id="p", address="10.0.0.7:1")], kv_cache_dtype="fp8_e4m3", encoding="fp8_e4m3fn"
)
ANSWER = PREFILL.model_dump_json(exclude_none=True).encode()


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """More addresses than are asked at once. They take connections and say nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1000)
        yield [f"user{n}@127.0.0.1:{listener.getsockname()[1]}" for n in range(2 * ASKS)]


@pytest.fixture
def good() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == PATH
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ANSWER)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def until(true: Callable[[], bool], within_s: float) -> float:
    """How long it took, in seconds."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < within_s
        time.sleep(0.01)
    return time.monotonic() - began


def test_an_engine_that_answers_is_known_at_once_and_forgotten(sources: Sources, good: str) -> None:
    until(lambda: sources.ensure(good), 30.0)
    known = sources.known.get(good)
    assert known is not None and (known.sources[0].engine_id, known.kv_cache_dtype) == ("p", "fp8_e4m3")
    sources.forget(good)
    assert sources.known.get(good) is None
    until(lambda: sources.ensure(good), 30.0)


def test_silent_addresses_cost_the_scheduler_one_glance_and_no_other_engine(
    sources: Sources, silent: list[str], good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    glances: list[float] = []
    monkeypatch.setattr(bootstrap, "wait", lambda asked, seconds: glances.append(seconds))
    monkeypatch.setattr(bootstrap, "ASK_S", 60.0)
    assert not any(sources.ensure(address) for address in silent[: ASKS - 1])
    assert glances == [GLANCE_S]
    until(lambda: sources.ensure(good), 30.0)


def test_only_so_many_are_asked_at_once_and_none_of_them_stays(
    sources: Sources, silent: list[str], good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "ASK_S", 10.0)
        assert not any(sources.ensure(address) for address in [*silent, good])
        assert sources._asking == set(silent[:ASKS])
    until(lambda: not sources._asking, 60.0)  # though nobody asks again
    until(lambda: sources.ensure(good), 30.0)


def test_names_that_are_not_found_give_their_places_back(
    sources: Sources, good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, look = threading.Event(), socket.getaddrinfo

    def slow(host: str, *more: Any, **named: Any) -> Any:
        if host.endswith("slow.invalid"):
            found.wait(60)
        return look(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        assert not any(sources.ensure(f"{n}.slow.invalid:1") for n in range(ASKS))
        until(lambda: not sources._asking, 30.0)
        until(lambda: sources.ensure(good), 30.0)
    finally:
        found.set()


@contextmanager
def asked(sources: Sources) -> Iterator[socket.socket]:
    """The connection of one that is asked; it may end meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not sources.ensure(f"127.0.0.1:{listener.getsockname()[1]}")
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            yield peer


def test_of_a_long_answer_only_the_beginning_is_read(sources: Sources, caplog: pytest.LogCaptureFixture) -> None:
    with asked(sources) as peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + ANSWER + b" " * MOST_NBYTES)
        until(lambda: not sources._asking, 30.0)
    assert f"more than {MOST_NBYTES} bytes" in caplog.text
    assert not sources.known


def test_an_answer_that_never_ends_has_a_deadline_too(sources: Sources) -> None:
    with asked(sources) as peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        while sources._asking:  # a sender whose connection has ended has its OSError
            time.sleep(ASK_S / 10)
            peer.sendall(b"x")
    until(lambda: not sources._asking, 30.0)


@pytest.mark.parametrize(
    ("host", "asked"), [("::", "[::1]"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_a_prefill_engine_answers_on_the_host_that_it_was_given_of_either_family(
    sources: Sources, host: str, asked: str, own_fleet: Fleet
) -> None:
    port = own_fleet.free_port()
    answer(host, port, 0, 1, PREFILL)
    until(lambda: sources.ensure(f"{asked}:{port}"), 30.0)


def test_a_prefill_engine_answers_by_ipv4_on_a_host_of_both_families(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, own_fleet: Fleet
) -> None:
    """As most hosts name `localhost`, the family of IPv6 first; routers say 127.0.0.1 of it."""
    look_up = socket.getaddrinfo

    def both(host: str, *about: Any, **more: Any) -> list[Any]:
        names = ("::1", "127.0.0.1") if host == "localhost" else (host,)
        return [each for name in names for each in look_up(name, *about, **more)]

    port = own_fleet.free_port()
    monkeypatch.setattr(socket, "getaddrinfo", both)
    answer("localhost", port, 0, 1, PREFILL)
    until(lambda: sources.ensure(f"127.0.0.1:{port}"), 30.0)


def test_the_first_dp_rank_answers_for_all_once_all_have_started(sources: Sources, own_fleet: Fleet) -> None:
    port = own_fleet.free_port()
    address = f"127.0.0.1:{port}"

    def start(dp_rank: int) -> None:
        source = SourceBody(engine_id=f"p-dp{dp_rank}", address=f"10.0.0.7:{dp_rank + 1}")
        answer("127.0.0.1", port, dp_rank, 3, PREFILL.model_copy(update={"sources": [source]}))

    start(0)
    start(1)
    assert not sources.ensure(address)
    until(lambda: not sources._asking, 30.0)
    assert not sources.ensure(address)
    start(2)
    until(lambda: sources.ensure(address), 30.0)
    assert (known := sources.known.get(address)) is not None
    assert [source.engine_id for source in known.sources] == ["p-dp0", "p-dp1", "p-dp2"]
