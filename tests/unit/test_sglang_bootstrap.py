"""Decode asks who prefills at an address that a request names: addresses that are silent cost nobody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvferry.sglang import bootstrap
from kvferry.sglang.bootstrap import ASK_S, ASKS, GLANCE_S, PATH, Sources


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
            self.wfile.write(b'{"engine_id": "p", "address": "10.0.0.7:1"}')

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
    until(lambda: sources.ensure(good), ASK_S)
    source = sources.get(good)
    assert source is not None and source.engine_id == "p"
    sources.forget(good)
    assert sources.get(good) is None
    until(lambda: sources.ensure(good), ASK_S)


def test_silent_addresses_cost_the_scheduler_one_glance_and_no_other_engine(
    sources: Sources, silent: list[str], good: str
) -> None:
    began = time.monotonic()
    assert not any(sources.ensure(address) for address in silent[: ASKS - 1])
    assert time.monotonic() - began < 10 * GLANCE_S
    until(lambda: sources.ensure(good), ASK_S)


def test_only_so_many_are_asked_at_once_and_none_of_them_stays(
    sources: Sources, silent: list[str], good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    said_at = bootstrap._said_at

    async def counted(address: str) -> bytes:
        asked.append(address)
        return await said_at(address)

    monkeypatch.setattr(bootstrap, "_said_at", counted)
    assert not any(sources.ensure(address) for address in [*silent, good])
    until(lambda: len(asked) == ASKS, ASK_S)
    until(lambda: not sources._asking, 3 * ASK_S)  # though nobody asks again
    assert set(asked) == set(silent[:ASKS])
    until(lambda: sources.ensure(good), ASK_S)


def test_an_answer_that_never_ends_has_a_deadline_too(sources: Sources) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not sources.ensure(f"127.0.0.1:{listener.getsockname()[1]}")
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            peer.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            for _ in range(20):
                time.sleep(ASK_S / 10)
                peer.sendall(b"x")
    assert not sources._asking
