"""The proxy in front of real engines and daemons: who orders, and what is freed when a request comes to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from foreign_engine import events, leaves
from stage import START_S, Stage

from kvferry.router import RouterClient
from kvferry.schemas import LeaseRecord, TransferRecord, TransferState
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = pytest.mark.xdist_group("stage")

PROMPT = [(7 * i) % 300 for i in range(75)]


def asked(request_id: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 7, "return_token_ids": True, "ignore_eos": True, **more}
    return {"json": body, "headers": {"X-Request-Id": request_id}}


def complete(url: str, request_id: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", timeout=60, **asked(request_id, **more))


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    if "event-stream" in answer.headers["content-type"]:
        return [token for event in events(answer.content) for token in event["choices"][0]["token_ids"]]
    return list(answer.json()["choices"][0]["token_ids"])


def leases(daemon: DaemonService) -> list[LeaseRecord]:
    async def ask() -> list[LeaseRecord]:
        async with RouterClient(daemon.url) as client:
            return await client.leases()

    return asyncio.run(ask())


def transfers(daemon: DaemonService, request_id: str) -> list[TransferRecord]:
    """Transfers of what a client called so: the proxy adds to it."""

    async def ask() -> list[TransferRecord]:
        async with RouterClient(daemon.url) as client:
            return await client.transfers()

    return [record for record in asyncio.run(ask()) if record.request_id.startswith(f"{request_id}-")]


def eventually(true: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def aborts(stage: Stage, order: str, request_id: str) -> list[str]:
    """Lines of the proxy's log on the aborts of a request."""
    lines = stage.proxies[order].tail(lines=100).splitlines()
    return [line for line in lines if f"request {request_id}-" in line and ": aborted at" in line]


def held(stage: Stage, request_id: str) -> bool:
    held = [lease for lease in leases(stage.prefill_daemon) if lease.request_id.startswith(f"{request_id}-")]
    return any(not lease.state.ended for lease in held)


@pytest.mark.parametrize("order", ["engine", "router"])
@pytest.mark.parametrize("stream", [True, False])
def test_whoever_orders_the_tokens_are_those_of_one_engine(order: str, stream: bool, stage: Stage) -> None:
    request_id = f"same-{order}-{stream}"
    expected = tokens(complete(stage.alone.url, request_id))
    answer = complete(stage.proxies[order].url, request_id, stream=stream)
    assert tokens(answer) == expected
    (record,) = transfers(stage.decode_daemons[0], request_id)
    assert record.state is TransferState.DONE
    assert record.request_id == answer.headers["x-kvferry-request-id"]
    if order == "router":  # the daemon that took the order speaks for all ranks
        assert [rank.rank for rank in record.ranks] == [0, 1]
    assert eventually(lambda: not held(stage, request_id))
    assert not aborts(stage, order, request_id)


@pytest.mark.parametrize("order", ["engine", "router"])
def test_a_refusal_of_decode_frees_prefill_at_once(order: str, stage: Stage) -> None:
    """Prefill takes the prompt, as it makes but one token; decode has not the room for all of them."""
    request_id = f"refused-{order}"
    answer = complete(stage.proxies[order].url, request_id, max_tokens=450)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prompt_too_long")
    assert eventually(lambda: len(aborts(stage, order, request_id)) == 3)  # a line per daemon
    assert sum("leases=1" in line for line in aborts(stage, order, request_id)) == 1
    assert not held(stage, request_id)
    assert all(record.state.ended for record in transfers(stage.decode_daemons[0], request_id))


@pytest.mark.parametrize("order", ["engine", "router"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_both_sides(order: str, stream: bool, stage: Stage) -> None:
    request_id = f"left-{order}-{stream}"
    stage.decode.signal(signal.SIGSTOP)  # so that the request hangs between prefill and decode
    try:
        url = f"{stage.proxies[order].url}/v1/completions"
        leaves(url, lambda: eventually(lambda: held(stage, request_id)), **asked(request_id, stream=stream))
        assert eventually(lambda: not held(stage, request_id))
        assert all(record.state.ended for record in transfers(stage.decode_daemons[0], request_id))
    finally:
        stage.decode.signal(signal.SIGCONT)
    assert len(tokens(complete(stage.proxies[order].url, f"after-{request_id}"))) == 7


def test_an_order_that_nobody_takes_fails_the_request_and_frees_prefill(stage: Stage) -> None:
    """A daemon that is down must not leave decode waiting for blocks that nobody moves."""
    fleet = Fleet()
    try:
        gone = fleet.daemon("gone")
        gone.signal(signal.SIGKILL)
        proxy = fleet.proxy(
            stage.prefill, stage.decode, prefill_daemons=[stage.prefill_daemon], decode_daemons=[gone], order="router"
        )
        asyncio.run(fleet.ready(proxy, timeout_s=START_S))
        answer = complete(proxy.url, "nobody", stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "daemon_unreachable")
        assert eventually(lambda: not held(stage, "nobody"))
    finally:
        fleet.close()


@pytest.mark.parametrize(("order", "down"), [("engine", "engine"), ("router", "engine"), ("router", "daemon")])
def test_another_decode_engine_reads_what_was_prefilled(order: str, down: str, stage: Stage) -> None:
    """The first one, or its daemon, was killed."""
    fleet = Fleet()
    try:
        gone = fleet.daemon("gone-first")
        asyncio.run(fleet.ready(gone, timeout_s=START_S))
        first = stage.bare if down == "daemon" else fleet.engine("first", preset="tiny", daemons=[gone])
        asyncio.run(fleet.ready(first, timeout_s=START_S))
        (gone if down == "daemon" else first).signal(signal.SIGKILL)
        second = ",daemon=".join([stage.decode.url, *(daemon.url for daemon in stage.decode_daemons)])
        proxy = fleet.proxy(
            stage.prefill, first, prefill_daemons=[stage.prefill_daemon], decode_daemons=[gone], order=order,
            flags=["--decode", second],
        )  # fmt: skip
        asyncio.run(fleet.ready(proxy, timeout_s=START_S))
        request_id = f"second-{order}-{down}"
        expected = tokens(complete(stage.alone.url, request_id))
        for turn in range(2):
            assert tokens(complete(proxy.url, f"{request_id}-{turn}")) == expected
        (record,) = transfers(stage.decode_daemons[0], f"{request_id}-0")
        assert record.state is TransferState.DONE
        assert eventually(lambda: not held(stage, request_id))
    finally:
        fleet.close()


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_the_daemon_that_did_not_answer_is_named(which: str, stage: Stage) -> None:
    daemon = stage.prefill_daemon if which == "prefill" else stage.decode_daemons[0]
    daemon.signal(signal.SIGSTOP)
    try:
        answer = complete(stage.proxies["router"].url, f"frozen-{which}")
    finally:
        daemon.signal(signal.SIGCONT)
    assert answer.status_code >= 500
    name = daemon.url if which == "decode" else str(daemon.socket)
    assert name in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("order", ["engine", "router"])
def test_a_storm_of_clients_that_leave_holds_nothing(order: str, stage: Stage) -> None:
    """vllm#29906: cancelled requests must not use the cache up."""
    dice = random.Random(order)
    url = stage.proxies[order].url

    async def ask(http: httpx.AsyncClient, request_id: str, stays_s: float, length: int, stream: bool) -> None:
        body = {"prompt": [dice.randrange(300) for _ in range(length)], "max_tokens": 6, "stream": stream}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stays_s):
                await http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})

    async def storm() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for wave in range(3):
                await asyncio.gather(
                    *(
                        ask(http, f"storm-{order}-{wave}-{i}", dice.uniform(0, 1), dice.randrange(3, 200), i % 2 == 0)
                        for i in range(25)
                    )
                )

    asyncio.run(storm())
    assert eventually(lambda: not held(stage, f"storm-{order}"))
    assert "Traceback" not in stage.proxies[order].log.read_text()
    expected = tokens(complete(stage.alone.url, f"calm-{order}"))
    assert tokens(complete(url, f"calm-{order}")) == expected
