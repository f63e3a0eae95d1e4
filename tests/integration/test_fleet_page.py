"""The proxy's view of a fleet: what all daemons behind it do, as JSON and as a page."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from browser import CHROMIUM, PHONE, Browser
from fleet import TIMEOUT_S, Daemons, under_way, until
from pair import TOKENS, Pair, a_pair, is_in, order, prefilled, waits_for
from ranks import Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, SourceBody, TransferRecord, TransferState
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
async def shared_daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Daemons]:
    """Daemons of this file: what they did lately is what its tests did."""
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield Daemons(fleet)


@pytest.fixture(scope="module")
async def shared_pair(shared_daemons: Daemons) -> AsyncIterator[Pair]:
    async with a_pair(shared_daemons) as pair:
        yield pair


@pytest.fixture(scope="module")
async def fleet(shared_daemons: Daemons, shared_pair: Pair) -> AsyncIterator[Service]:
    """A proxy before the pair, and before a decode engine whose daemon is not there."""
    gone = "--decode", f"http://127.0.0.1:3,daemon={NOWHERE}"
    ours, theirs = shared_pair.prefill.daemons, shared_pair.decode.daemons
    async with proxy(shared_daemons, "--fleet", *gone, prefill_daemons=ours, decode_daemons=theirs) as started:
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
        (daemon,) = [each for each in (await look(fleet))["daemons"] if each["url"] == pair.routers[0].url]
        last = (daemon["failed_lately"] or {}).get("last", {})
        return daemon["state"] == "degraded" and last.get("transfer_id") == record.transfer_id

    await until(degraded, "so says the row of its daemon, and why")


async def test_what_was_slow_is_listed_without_its_waits(fleet: Service, pair: Pair, request_id: str) -> None:
    """As p50 and p99 of a pair leave them out, the slowest first."""
    late = f"{request_id}-late"
    async with under_way(pair.decode.receive(late, pair.decode.take(TOKENS), (0, TOKENS))) as receiving:
        await until(lambda: is_in(pair.routers[0], late, TransferState.WAITING), "it is reserved")
        records = [await moved(pair, f"{request_id}-{number}") for number in range(2)]  # it waits longer than they take
        await prefilled(pair, late)
        records.append(await pair.routers[0].wait(await order(pair, late)))
        await receiving

    async def slow() -> dict[str, Any]:
        return {each["transfer_id"]: each for each in (await look(fleet))["slow"]}

    async def told() -> bool:
        return {record.transfer_id for record in records} <= (await slow()).keys()

    await until(told, "all of them are listed")
    listed = await slow()
    took = [each["took_ms"] for each in listed.values()]
    assert took == sorted(took, reverse=True)
    for record in records:
        found, phases = listed[record.transfer_id], record.phases_ms
        assert found["took_ms"] == pytest.approx(phases["total"] - phases["waiting"])
        assert (found["url"], found["request_id"]) == (pair.routers[0].url, record.request_id)
        longest = max(("connecting", "reading", "verifying"), key=lambda phase: phases.get(phase, 0.0))
        assert (found["longest"], found["longest_ms"]) == (longest, phases[longest])


async def test_peers_that_were_lost_and_daemons_that_were_never_met_are_told(
    daemons: Daemons, own_fleet: Fleet
) -> None:
    there, here = (own_fleet.daemons(name, 1) for name in ("there", "here"))
    await own_fleet.ready(*there, *here, timeout_s=TIMEOUT_S)
    source, reader = [await TestEngine.start(name, at, Shape.tp(1)) for name, at in (("there", there), ("here", here))]
    nobody = SourceBody(engine_id="nobody", address=NOWHERE.removeprefix("http://"))
    async with (
        RouterClient(here[0].url) as router,
        proxy(daemons, "--fleet", prefill_daemons=there, decode_daemons=here) as started,
    ):
        waiting = uuid.uuid4().hex
        async with under_way(reader.receive(waiting, reader.take(TOKENS), source=source.source())) as receiving:
            await until(lambda: waits_for(router, waiting, Awaited.PUBLISH), "it hears the source, whose end it hears")
            there[0].process.kill()
            with pytest.raises(TransferFailed):
                await receiving

        async def lost() -> bool:
            for place in (source.source(), nobody):
                with suppress(TransferFailed):
                    await reader.receive(uuid.uuid4().hex, reader.take(TOKENS), (0, TOKENS), source=place)
            known = await router.neighbours()
            return [peer.engine_id for peer in known.lost] == ["there"] and not known.peers and bool(known.unmet)

        await until(lost, "the daemon has forgotten the one, and called the other")

        async def told() -> bool:
            seen = await look(started)
            unmet = [each["address"] for daemon in seen["daemons"] for each in daemon["unmet"]]
            return row(seen, "there")["failing"] == [0] and unmet == [nobody.address]

        await until(told, "the pair's row and the daemon's have them")
    await asyncio.gather(source.close(), reader.close())


async def test_a_failure_counts_from_when_it_was_by_the_clock_of_its_daemon(
    daemons: Daemons, own_fleet: Fleet, request_id: str, jump: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (daemon,) = ahead = own_fleet.daemons("ahead", 1)
    await own_fleet.ready(*ahead, timeout_s=TIMEOUT_S)
    engine = await TestEngine.start("ahead", ahead, Shape.tp(1))
    monkeypatch.delenv("LD_PRELOAD")  # the proxy has another clock
    async with RouterClient(daemon.url) as router:

        async def fails(name: str) -> None:
            nobody = SourceBody(engine_id="nobody", address="127.0.0.1:9")
            ordered = await router.order(OrderBody(request_id=name, source=nobody, deadline_ms=1))
            await router.wait(ordered.transfer_id)

        await fails("hours ago")
        jump(7200)
        await fails("before the first look")
        async with proxy(daemons, "--fleet", decode_daemons=ahead) as started:

            async def shows(name: str) -> bool:
                return [each["request_id"] for each in (await look(started))["failures"]] == [name]

            await until(lambda: shows("before the first look"), "it alone is shown")
            assert row(await look(started), "nobody")["failed"] == 1
            await fails("while nobody looked")
            jump(7200 + 301)
            await fails("now")
            await until(lambda: shows("now"), "the last of them alone is shown")
    await engine.close()


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

        await until(lambda: failed("seen", "before"), "both have failed")
        await ordered("dies", 60_000)
        for process in psutil.Process(kept.process.pid).children():
            process.kill()
        await until(lambda: failed("dies", "seen", "before"), "and so has what died with the daemon")
    await engine.close()


async def test_a_daemon_that_does_not_answer_is_said_and_the_others_are_shown(fleet: Service, pair: Pair) -> None:
    daemons: dict[tuple[str, str], Any] = {}

    async def all_but_one_answer() -> bool:
        daemons.update({(each["role"], each["url"]): each for each in (await look(fleet))["daemons"]})
        return [at for at, each in daemons.items() if each["error"] is not None] == [("decode", NOWHERE)]

    await until(all_but_one_answer, "the others have answered in time")
    assert len(daemons) == len(pair.daemons) + 1
    gone = daemons.pop(("decode", NOWHERE))
    assert gone["error"]["code"] == "daemon_unreachable" and not gone["ready"]
    assert all(each["ready"] and each["version"] for each in daemons.values())
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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desk", "phone"])
async def test_the_page_names_what_fails_and_can_be_read(
    chrome: Browser, fleet: Service, pair: Pair, request_id: str, screen: dict[str, int]
) -> None:
    done, refused = f"{request_id}-done", f"{request_id}-refused"
    async with chrome.watching(fleet.url, "fleet/", **screen) as page:
        waiting = f"{request_id}-waiting"
        async with under_way(pair.decode.outcomes(waiting, pair.decode.take(TOKENS), source=pair.prefill.source())):
            await page.until("document.getElementById('pairs').innerText.includes('1 for publish')")
            await pair.routers[0].abort_request(waiting)
        await moved(pair, done)
        record = await failed(pair, refused, "nobody")
        await page.until(f"document.getElementById('failures').innerText.includes('{refused}')")
        link = f"{pair.routers[0].url}/#transfer={record.transfer_id}"
        await page.until(f"[...document.querySelectorAll('#daemons small a')].some((it) => it.href === {link!r})")
        headline = r"^1 daemon not ready, \d degraded(, \d peers? without an answer)?, \d pairs? with failures$"
        await page.until(f"/{headline}/.test(document.getElementById('state').innerText)")
        assert "degraded" in await page.texts("#daemons .chip.wait")
        assert "nobody" in (await page.texts("#pairs tr"))[0]
        assert any(text.startswith("prefill\n") for text in await page.texts("#pairs tr"))
        links = await page.value("[...document.querySelectorAll('#failures a')].map((it) => it.href)")
        assert link in links
        await page.until(f"[...document.querySelectorAll('#slow a')].some((it) => it.innerText === {done!r})")
        assert "daemon_unreachable" in (await page.texts("#daemons tr"))[0]
        await page.readable()


async def test_one_router_client_leaves_manifests_out(pair: Pair) -> None:
    async with RouterClient(pair.routers[0].url) as client:
        assert [engine.manifest for engine in await client.engines(manifests=False)] == [{}]
        assert all(engine.manifest for engine in await client.engines())
