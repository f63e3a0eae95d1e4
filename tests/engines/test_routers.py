"""Other projects' routers in front of vLLM with kvferry: the tokens are those of one engine, and the KV was moved.

A tokenizer whose words are tokens lets every kind of request have the same prompt: not all routers take token ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engines import (
    ANSWER_S,
    LENGTHS,
    PYTHON,
    SETTLE_S,
    START_S,
    Pair,
    Service,
    at_rest,
    cache_usage,
    eventually,
    metric,
    pair,
    prompt,
    whole,
    worded,
    words,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
KINDS = list(itertools.product(("completions", "chat/completions"), (False, True)))
"""Kinds of requests: the path, and whether the answer is a stream."""
TOKENS = 8
"""Tokens of an answer, where no other number is asked for."""
LEASE_TTL_S = 60


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    modules = "vllm_router", "smg", "mooncake"
    found = f"from importlib.util import find_spec; assert all(map(find_spec, {modules}))"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", found], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"{', '.join(modules)} are not installed beside vLLM: make engines-venv installs them")
    side = {"transfer": {"kv_connector": "NixlConnector"}, "flags": ("--no-skip-tokenizer-init",)}
    with pair(worded, prefill=side, decode=side, daemon_flags=("--lease-ttl-s", str(LEASE_TTL_S))) as both:
        yield both


def proxy(engines: Pair) -> Service:
    return engines.fleet.proxy(engines.prefill, engines.decode)


def vllm_router(engines: Pair) -> Service:
    return engines.fleet.router(
        "vllm-router", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl",
        "--prefill", engines.prefill.url, "--decode", engines.decode.url, *CHECKS, *metrics(engines),
    )  # fmt: skip


def smg(engines: Pair) -> Service:
    """It moves KV only between workers that it has been told the connector of."""
    gateway = engines.fleet.router(
        "smg", "smg", "launch", "--pd-disaggregation", "--backend", "vllm", *CHECKS, *metrics(engines)
    )
    asyncio.run(engines.fleet.ready(gateway, timeout_s=START_S))
    for role, engine in (("prefill", engines.prefill), ("decode", engines.decode)):
        labels = {"kv_connector": "NixlConnector"}
        worker = {"url": engine.url, "worker_type": role, "runtime": "vllm", "labels": labels}
        httpx.post(f"{gateway.url}/workers", json=worker, trust_env=False, timeout=ANSWER_S).raise_for_status()

    def both() -> bool:
        workers = httpx.get(f"{gateway.url}/workers", trust_env=False).json()["workers"]
        return [worker["is_healthy"] for worker in workers] == [True, True]

    assert eventually(both)
    return gateway


def toy_proxy(engines: Pair) -> Service:
    """The toy proxy of vLLM's repository, as Mooncake's package has it."""
    sides = (("prefiller", engines.prefill), ("decoder", engines.decode))
    ports = [part for name, engine in sides for part in (f"--{name}-port", str(urlsplit(engine.url).port))]
    hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
    return engines.fleet.router("toy-proxy", "mooncake.vllm_v1_proxy_server", *hosts, *ports, path="/healthcheck")


CHECKS = (
    "--health-check-interval-secs", "1", "--cb-timeout-duration-secs", "1", "--worker-startup-check-interval", "1",
)  # fmt: skip
"""So that an engine that is back is soon seen."""
ROUTERS: dict[str, Callable[[Pair], Service]] = {
    "kvferry proxy": proxy, "vllm-router": vllm_router, "smg": smg, "toy proxy": toy_proxy
}  # fmt: skip
DECODED_ALONE = {"smg"}
"""Sends a request for several answers to the decode engine only: nothing is to be moved."""


def metrics(engines: Pair) -> tuple[str, str]:
    return "--prometheus-port", str(engines.fleet.free_port())


@pytest.fixture(scope="module")
def routers(engines: Pair) -> dict[str, Service]:
    started = {name: start(engines) for name, start in ROUTERS.items()}
    asyncio.run(engines.fleet.ready(*started.values(), timeout_s=START_S))
    return started


@pytest.fixture(params=ROUTERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def router(name: str, routers: dict[str, Service]) -> Service:
    return routers[name]


@contextmanager
def asked(
    service: Service, tokens: Sequence[int], path: str = "completions", stream: bool = False, **more: Any
) -> Iterator[httpx.Response]:
    text = words(tokens)
    what = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | what
    with (
        httpx.Client(trust_env=False, timeout=ANSWER_S) as http,
        http.stream("POST", f"{service.url}/v1/{path}", json=body | more | {"stream": stream}) as response,
    ):
        yield response


@dataclass(frozen=True)
class Told:
    """The part that a client heard. tokens: of each answer, as far as they came. error: how it ended; empty of a whole
    one."""

    tokens: list[list[int]]
    error: str = ""


def told(service: Service, tokens: Sequence[int], path: str, stream: bool, **more: Any) -> Told:
    text, error = "", ""
    try:
        with asked(service, tokens, path, stream, **more) as response:
            for part in response.iter_text():
                text += part
            response.raise_for_status()
    except httpx.HTTPStatusError as refused:
        return Told([], str(refused.response.status_code))
    except httpx.HTTPError as broken:
        error = type(broken).__name__
    lines = [text]
    if stream:
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        lines = [line.removeprefix("data: ") for line in whole_lines if line.startswith("data: {")]
        error = error or ("" if text.rstrip().endswith("data: [DONE]") else "no end")
    elif error:
        return Told([], error)
    heard: dict[int, list[int]] = {}
    for said in map(json.loads, lines):
        error = error or str(said.get("error", ""))
        for choice in said.get("choices", ()):
            heard.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    return Told([heard[index] for index in sorted(heard)], error)


def answers(service: Service, tokens: Sequence[int], path: str, stream: bool, **more: Any) -> list[list[int]]:
    """The tokens of each answer, whole or as a stream."""
    heard = told(service, tokens, path, stream, **more)
    assert not heard.error
    return heard.tokens


def seed(name: str) -> int:
    """Prompts of its own for each router: what a prefix cache holds is not moved."""
    return 100 * (1 + list(ROUTERS).index(name))


def test_sixteen_at_once_of_every_kind_have_the_tokens_of_one_engine(engines: Pair, name: str, router: Service) -> None:
    before = len(engines.transfers())
    prompts = [prompt(length, seed(name)) for length in LENGTHS]
    kinds = list(itertools.islice(itertools.cycle(KINDS), len(prompts)))
    with ThreadPoolExecutor(16) as pool:
        moved = list(pool.map(lambda tokens, kind: answers(router, tokens, *kind), prompts, kinds))
        alone = list(pool.map(lambda tokens: answers(engines.prefill, tokens, *KINDS[0]), prompts))
    different = [(len(each), kind) for each, kind, a, b in zip(prompts, kinds, moved, alone, strict=True) if a != b]
    assert not different, f"{different} have other tokens: {moved}, alone {alone}"
    transfers = engines.transfers()[before:]
    assert {one.state for one in transfers} == {"done"}
    assert sorted(one.tokens or () for one in transfers) == sorted((0, whole(length)) for length in LENGTHS)
    nothing_is_left(engines)


@pytest.mark.parametrize(
    ("path", "stream"), [KINDS[0], *(pytest.param(*kind, marks=pytest.mark.long) for kind in KINDS[1:])]
)
def test_two_answers_to_one_prompt(engines: Pair, name: str, router: Service, path: str, stream: bool) -> None:
    before = len(engines.transfers())
    tokens = prompt(150, seed(name) + 1 + KINDS.index((path, stream)))
    two: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 7}
    told = answers(router, tokens, path, stream, **two)
    assert told[0] != told[1]
    assert told == answers(engines.prefill, tokens, path, stream, **two)
    assert [one.state for one in engines.transfers()[before:]] == ([] if name in DECODED_ALONE else ["done"])
    nothing_is_left(engines)


@pytest.mark.parametrize("path", ["completions", pytest.param("chat/completions", marks=pytest.mark.long)])
def test_a_client_that_leaves_takes_its_request_along(engines: Pair, name: str, router: Service, path: str) -> None:
    tokens = prompt(170, seed(name) + len(path))
    with asked(router, tokens, path, stream=True, max_tokens=3000) as response:
        chunks = response.iter_bytes()  # an iterator that is forgotten closes the connection
        assert next(chunks)
        assert eventually(lambda: metric(engines.decode, "num_requests_running") == 1)
    assert eventually(lambda: metric(engines.decode, "num_requests_running") == 0)
    nothing_is_left(engines)


LONG: dict[str, tuple[int, dict[str, Any]]] = {"prefill": (3000, {}), "decode": (100, {"max_tokens": 3900})}
"""Requests that are long in an engine: the length of their prompt, and what else they ask for."""
COMPARED = 32
"""Tokens of each answer, or of what came of it."""
REFUSALS = {
    "kvferry proxy": "502", "vllm-router": "500|503", "smg": "50[0-4]", "toy proxy": "500|RemoteProtocolError"
}  # fmt: skip
"""How requests for no stream end whose engine is dead: docs/routers.md."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("side", LONG)
def test_an_engine_that_dies_behind_all_routers(engines: Pair, routers: dict[str, Service], side: str) -> None:
    """Its requests end with an error, or are right; those that come before it is there again end with an error."""
    victim: Service = getattr(engines, side)
    (length, more), number = LONG[side], 20 + 20 * list(LONG).index(side)
    before = len(engines.transfers())
    sent = [(name, prompt(length, seed(name) + number + i), kind) for i, kind in enumerate(KINDS) for name in routers]
    with ThreadPoolExecutor(len(sent)) as pool:
        under_way = [pool.submit(told, routers[name], tokens, *kind, **more) for name, tokens, kind in sent]
        if side == "prefill":  # a request has been handed over, and the others are being prefilled
            assert eventually(lambda: "done" in {one.state for one in engines.transfers()[before:]})
        else:
            assert eventually(lambda: metric(victim, "num_requests_running") > len(sent) / 2)
        engines.kill(victim)
        heard = [one.result() for one in under_way]
    late = [(name, prompt(90, seed(name) + number + 4 + i), kind) for i, kind in enumerate(KINDS) for name in routers]
    heard_late = [told(routers[name], tokens, *kind) for name, tokens, kind in late]
    assert {name for (name, *_), one in zip(sent, heard, strict=True) if one.error} == {*routers}
    assert all(one.error and not one.tokens for one in heard_late), heard_late
    ends = [
        (name, one.error)
        for (name, _, (_, stream)), one in zip([*sent, *late], [*heard, *heard_late], strict=True)
        if one.error and not stream
    ]
    assert all(re.fullmatch(REFUSALS[name], error) for name, error in ends), ends
    engines.start_again(victim)

    for name, router in routers.items():
        tokens = prompt(200, seed(name) + number + 8)
        assert eventually(lambda: not told(router, tokens, *KINDS[0]).error), f"{name} does not use it again"  # noqa: B023
        tokens, before = prompt(200, seed(name) + number + 9), len(engines.transfers())
        assert answers(router, tokens, *KINDS[0]) == answers(engines.prefill, tokens, *KINDS[0])
        assert {one.state for one in engines.transfers()[before:]} == {"done"}
    for (name, tokens, kind), one in zip(sent, heard, strict=True):
        (answer,) = one.tokens or [[]]
        assert one.error or len(answer) == more.get("max_tokens", TOKENS)
        alone = engines.alone(tokens, max_tokens=COMPARED) if answer else []
        assert answer[:COMPARED] == alone[: len(answer)], f"{name} {kind} {one.error}"
    nothing_is_left(engines, SETTLE_S + LEASE_TTL_S)


def nothing_is_left(engines: Pair, within_s: float = SETTLE_S) -> None:
    assert eventually(lambda: not engines.leases(), within_s), engines.leases()
    assert eventually(lambda: cache_usage(engines.prefill) == 0 == cache_usage(engines.decode))
    assert eventually(lambda: all(map(at_rest, (*engines.prefill_daemons, *engines.decode_daemons))))
