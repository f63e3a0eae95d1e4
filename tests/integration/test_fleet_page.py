"""The proxy's view of a fleet: what all daemons behind it do, as JSON and as a page."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from browser import CHROMIUM, CLIPPED, CONTRASTS, PHONE, Browser, browser
from fleet import TIMEOUT_S, Daemons, under_way, until
from pair import TOKENS, Pair, is_in, order, prefilled
from ranks import Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import OrderBody, SourceBody, TransferRecord, TransferState
from kvferryd.demo.fleet import Fleet, Service

pytestmark = pytest.mark.anyio
NOWHERE = "http://127.0.0.1:9"
"""The port of nobody."""


PREFILL, DECODE = "http://127.0.0.1:1", "http://127.0.0.1:2"
"""Engines of which only the daemons are asked."""


@asynccontextmanager
async def proxy(daemons: Daemons, *flags: str, **named: Any) -> AsyncIterator[Service]:
    started = daemons.fleet.proxy(PREFILL, DECODE, flags=flags, **named)
    await daemons.fleet.ready(started, timeout_s=TIMEOUT_S)
    try:
        yield started
    finally:
        started.signal(signal.SIGTERM)


@pytest.fixture(scope="module")
async def fleet(shared_daemons: Daemons, shared_pair: Pair) -> AsyncIterator[Service]:
    """A proxy before the pair, and before a decode engine whose daemon is not there."""
    gone = "--decode", f"http://127.0.0.1:3,daemon={NOWHERE}"
    ours, theirs = shared_pair.prefill.daemons, shared_pair.decode.daemons
    async with proxy(shared_daemons, "--fleet", *gone, prefill_daemons=ours, decode_daemons=theirs) as started:
        await look(started)  # later ends are counted
        yield started


async def look(proxy: Service) -> Any:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        return (await client.get(f"{proxy.url}/v1/fleet")).raise_for_status().json()


def row(seen: Any, source: str = "prefill") -> dict[str, Any]:
    """The pair's that reads from this engine; empty where there is none."""
    return next((each for each in seen["pairs"] if each["source_engine_id"] == source), {})


async def moved(pair: Pair, request_id: str) -> TransferRecord:
    await prefilled(pair, request_id)
    async with under_way(pair.decode.receive(request_id, pair.decode.take(TOKENS), (0, TOKENS))):
        return await pair.routers[0].wait(await order(pair, request_id))


async def failed(pair: Pair, request_id: str, source: str) -> TransferRecord:
    """An order that nobody can fulfil."""
    nobody = SourceBody(engine_id=source, address="127.0.0.1:9")
    ordered = await pair.routers[0].order(OrderBody(request_id=request_id, source=nobody, deadline_ms=1))
    return await pair.routers[0].wait(ordered.transfer_id)


async def test_a_pair_has_a_row_with_what_it_does_and_did(fleet: Service, pair: Pair, request_id: str) -> None:
    before = row(await look(fleet))
    waiting = f"{request_id}-waiting"
    async with under_way(pair.decode.outcomes(waiting, pair.decode.take(TOKENS), source=pair.prefill.source())):
        await until(lambda: is_in(pair.routers[0], waiting, TransferState.CONNECTING), "it waits for its publish")
        record = await moved(pair, request_id)

        async def told() -> bool:
            now = row(await look(fleet))
            return bool(now) and now["done"] > before.get("done", 0) and now["waits"].get("publish") == 1

        await until(told, "the pair's row has both")
        now = row(await look(fleet))
        assert (now["source"], now["destination"]) == (PREFILL, DECODE)
        assert now["engine_id"] == "decode" and now["path"] == record.path and now["failed"] == 0
        assert now["bytes"] - before.get("bytes", 0) == record.bytes
        assert 0 < now["p50_ms"] <= now["p99_ms"]
        await pair.routers[0].abort_request(waiting)


async def test_a_failure_is_a_row_of_its_own_with_its_reason_and_its_daemon(
    fleet: Service, pair: Pair, request_id: str
) -> None:
    record = await failed(pair, request_id, "nobody")

    async def told() -> bool:
        return row(await look(fleet), "nobody").get("failed", 0) > 0

    await until(told, "the pair that failed has a row")
    seen = await look(fleet)
    assert row(seen, "nobody")["source"] == "", "no prefill engine of this proxy"
    assert record.error is not None and row(seen, "nobody")["error"]["code"] == record.error.code
    (found,) = [each for each in seen["failures"] if each["request_id"] == request_id]
    assert (found["url"], found["transfer_id"]) == (pair.routers[0].url, record.transfer_id)
    assert seen["pairs"][0]["failed"] > 0, "those that fail come first"

    async def degraded() -> bool:
        daemons = (await look(fleet))["daemons"]
        return "degraded" in [each["state"] for each in daemons if each["url"] == pair.routers[0].url]

    await until(degraded, "so says the row of its daemon")


async def test_what_ended_before_a_daemon_died_counts_once(
    daemons: Daemons, own_fleet: Fleet, pair: Pair, request_id: str
) -> None:
    kept = own_fleet.daemon("kept", kept=True)
    await own_fleet.ready(kept, timeout_s=TIMEOUT_S)
    engine = await TestEngine.start("kept", [kept], Shape.tp(1))
    async with (
        RouterClient(kept.url) as router,
        proxy(daemons, "--fleet", prefill_daemons=pair.prefill.daemons, decode_daemons=[kept]) as started,
    ):

        async def ordered(name: str, deadline_ms: int) -> str:
            nobody = SourceBody(engine_id="nobody", address="127.0.0.1:9")
            body = OrderBody(request_id=f"{request_id}-{name}", source=nobody, deadline_ms=deadline_ms)
            return (await router.order(body)).transfer_id

        await router.wait(await ordered("before", 1))
        await look(started)
        await router.wait(await ordered("seen", 1))

        async def failed(*names: str) -> bool:
            seen = await look(started)
            return [each["request_id"] for each in seen["failures"]] == [f"{request_id}-{name}" for name in names]

        await until(lambda: failed("seen"), "it has failed")
        await ordered("dies", 60_000)
        for process in psutil.Process(kept.process.pid).children():
            process.kill()
        await until(lambda: failed("dies", "seen"), "and so has what died with the daemon")
    await engine.close()


async def test_a_daemon_that_does_not_answer_is_said_and_the_others_are_shown(fleet: Service, pair: Pair) -> None:
    seen = await look(fleet)
    daemons = {(each["role"], each["url"]): each for each in seen["daemons"]}
    assert len(daemons) == len(pair.daemons) + 1
    gone = daemons.pop(("decode", NOWHERE))
    assert gone["error"]["code"] == "daemon_unreachable" and not gone["ready"]
    assert all(each["ready"] and each["error"] is None and each["version"] for each in daemons.values())
    assert [each["engine_ids"] for each in daemons.values()].count(["decode"]) == len(pair.routers)


async def test_many_who_look_are_one_question_to_each_daemon(fleet: Service) -> None:
    seen = await asyncio.gather(*(look(fleet) for _ in range(20)))
    assert len({each["asked_at"] for each in seen}) <= 2


async def test_the_page_needs_no_token_and_its_data_does(shared_daemons: Daemons, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    token = "--api-token-file", str(tmp_path / "token")
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S) as client,
        proxy(shared_daemons, "--fleet", *token) as closed,
        proxy(shared_daemons) as without,
    ):
        assert (await client.get(f"{closed.url}/fleet/")).status_code == 200
        assert (await client.get(f"{closed.url}/v1/fleet")).status_code == 401
        given = {"authorization": "Bearer sesame"}
        assert (await client.get(f"{closed.url}/v1/fleet", headers=given)).json()["pairs"] == []
        for path in ("/fleet/", "/v1/fleet"):
            assert (await client.get(f"{without.url}{path}")).status_code == 404, "asked for by --fleet alone"


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with browser(tmp_path_factory.mktemp("chromium")) as begun:
        yield begun


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_the_page_names_what_fails_and_can_be_read(
    chrome: Browser, fleet: Service, pair: Pair, request_id: str, screen: dict[str, int], dark: bool
) -> None:
    done, refused = f"{request_id}-done", f"{request_id}-refused"
    async with chrome.watching(fleet.url, "fleet/", **screen, dark=dark) as page:
        await moved(pair, done)
        record = await failed(pair, refused, "nobody")
        await page.until(f"document.getElementById('failures').innerText.includes('{refused}')")
        assert (await page.texts("#state")) == ["1 daemon not ready"]
        assert "nobody" in (await page.texts("#pairs tr"))[0]
        assert any("prefill" in text and "decode" in text for text in await page.texts("#pairs tr"))
        links = await page.value("[...document.querySelectorAll('#failures a')].map((it) => it.href)")
        assert f"{pair.routers[0].url}/#transfer={record.transfer_id}" in links
        assert "daemon_unreachable" in (await page.texts("#daemons tr"))[0]
        assert await page.value(CLIPPED) == []
        assert await page.value(CONTRASTS) == []


async def test_one_router_client_leaves_manifests_out(pair: Pair) -> None:
    async with RouterClient(pair.routers[0].url) as client:
        assert [engine.manifest for engine in await client.engines(manifests=False)] == [{}]
        assert all(engine.manifest for engine in await client.engines())
