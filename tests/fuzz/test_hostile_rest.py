"""The REST API as its OpenAPI document has it, and bodies that nearly fit it: never a 500, and nobody is harmed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import TIMEOUT_S, Daemons
from hostile import Hostile
from target import Target

from kvferry.schemas import OrderBody

pytestmark = pytest.mark.anyio
counts = pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.long)])
CHECKS = (
    "no_fault_of_its_own,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,allow_header_conformance"
)
HOOKS = "schemathesis_hooks"
KINDS = {"application/problem+json", "application/json"}


async def schemathesis(url: str, *flags: str, known: dict[str, list[str]] | None = None) -> None:
    """known: values by the name of a field, of which some are sent. Every failure is printed with the curl command that
    repeats it."""
    seed = os.environ["FUZZ_SEED"]
    command = ["run", f"{url}/openapi.json", "--seed", seed, "--checks", CHECKS, "--request-timeout", f"{TIMEOUT_S}"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    told = {"SCHEMATHESIS_HOOKS": HOOKS, "HOSTILE_KNOWN": json.dumps(known or {}), "PYTHONPATH": paths}
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", *command, "--no-color", *flags,
        env=os.environ | told, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await run.communicate()
    finally:
        if run.returncode is None:
            run.kill()
    assert run.returncode == 0, said.decode()


@pytest.mark.parametrize(
    "flags",
    [
        ("--phases", "examples,fuzzing", "--max-examples", "3"),
        pytest.param(("--max-examples", "60"), marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
    ids=["short", "whole"],
)
async def test_the_api_keeps_to_its_document(attacked: Target, flags: tuple[str, ...]) -> None:
    """Without the drain, after which nothing can be tried any more: it has a daemon of its own below."""
    attacked.loaded += 100  # it may forget and prewarm the friend
    async with things(attacked) as known:
        await schemathesis(attacked.daemon.url, *flags, "--exclude-path", "/v1/drain", known=known)
    await attacked.cleared()


@asynccontextmanager
async def things(target: Target) -> AsyncIterator[dict[str, list[str]]]:
    """The names of what the daemon has: a lease, an order that waits, peers; and of what it has not."""
    (rank,), name, id = target.engine.ranks, "of both", uuid.uuid4().hex
    await rank.client.publish(name, target.engine.take(20).tables(), 20)
    ordered = await target.router.order(OrderBody(request_id=name, source=target.friend.source(), order_id=id))
    yield {
        "address": [*target.forbidden.addresses, target.silent, target.friend.address],
        "engine_id": [target.engine.engine_id, target.friend.engine_id, "nobody"],
        "epoch": [target.engine.epoch, target.friend.epoch, "old"],
        "request_id": [name, "another"], "order_id": [id, "another"],
        "transfer_id": [ordered.transfer_id, "none"],
    }  # fmt: skip
    await rank.client.abort(name)


async def test_a_drain_keeps_to_its_document(daemons: Daemons) -> None:
    (daemon,) = await daemons.start("drained")
    await schemathesis(
        daemon.url, "--include-path", "/v1/drain", "--phases", "examples,coverage", "--max-examples", "10"
    )
    async with httpx.AsyncClient(base_url=daemon.url, trust_env=False) as http:
        assert (await http.post("/v1/drain")).json()["drained"]  # once more: a drain may have been taken back
        assert (await http.get("/healthz")).status_code == 200
    assert "Traceback" not in daemon.log.read_text()


@counts
async def test_bodies_that_nearly_fit(attacked: Target, rng: random.Random, count: int) -> None:
    """Orders, tables, manifests: JSON that is good but for a few places, and now and then is no JSON at all."""
    own, other = (each.ranks[0].manifest.model_dump(mode="json") for each in (attacked.engine, attacked.friend))
    tables = attacked.engine.take(20).json()
    source = {
        "engine_id": attacked.friend.engine_id,
        "address": attacked.friend.address,
        "epoch": attacked.friend.epoch,
    }
    order = {"request_id": "r", "source": source, "priority": 1, "deadline_ms": 100, "way": "auto", "order_id": "p"}
    good: list[tuple[str, dict[str, Any]]] = [
        ("/v1/transfers", order | {"destination": {"tables": tables, "token_range": [0, 20]}}),
        ("/v1/transfers", order | {"source": source | {"lease": 1}, "attempt": 1, "order_id": "o"}),
        ("/v1/peers", {"engine_id": attacked.friend.engine_id, "address": attacked.friend.address}),
        (
            "/v1/explain",
            {
                "sources": [other], "destination": own,
                "tables": {"source": tables, "destination": tables, "tokens": [0, 20]},
            },
        ),
    ]  # fmt: skip
    gate, seen = asyncio.Semaphore(8), Counter[str]()

    async def one(http: httpx.AsyncClient, path: str, content: bytes) -> None:
        async with gate:
            headers = {"content-type": "application/json"}
            answer = await http.post(path, content=content, headers=headers, timeout=TIMEOUT_S)
        kind = answer.headers["content-type"]
        what = f"{answer.status_code} {answer.text[:1000]} was the answer to POST {path} {content!r}"
        assert answer.status_code < 500 or answer.status_code in (502, 503, 504), what
        assert kind in KINDS, what
        assert answer.is_success or answer.json()["code"] not in ("", "internal"), what
        seen[f"{path} {answer.json().get('code', answer.status_code)}"] += 1

    async with things(attacked) as known:
        making, cases = Hostile(rng, known), []
        for path, body in good:
            for _ in range(count if path != "/v1/peers" else count // 10):
                said = json.dumps(making.json(body)).encode()
                cases.append((path, making.garbled(said) if rng.random() < 0.1 else said))
        rng.shuffle(cases)
        async with httpx.AsyncClient(base_url=attacked.daemon.url, trust_env=False) as http:
            await asyncio.gather(*(one(http, *case) for case in cases))
    await attacked.cleared()
    print(dict(seen.most_common()))
    assert seen["/v1/explain 200"]
