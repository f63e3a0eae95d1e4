"""The status page in a real browser, beside real daemons, while transfers happen."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import uuid
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser import CHROMIUM, PHONE, Browser, Page
from fleet import TIMEOUT_S, Daemons, under_way, until
from lives import engine_on, never_written, published, reads_from
from pair import MANY, TOKENS, Pair, half_published, order, prefilled, waits_longest
from ranks import Shape, TestEngine

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, PeerRequest, SourceBody, TransferRecord
from kvferryd.commands import say
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.observe.waits import others

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; test_page_files.py has read the page's files"),
]


def watching(
    chrome: Browser, daemon: DaemonService, fragment: str = "", **more: Any
) -> AbstractAsyncContextManager[Page]:
    return chrome.watching(daemon.url, fragment, **more)


def row(request_id: str) -> str:
    """JavaScript: the row of the request, or undefined."""
    return f"[...document.querySelectorAll('#rows tr')].find((it) => it.innerText.includes({json.dumps(request_id)}))"


async def moved(pair: Pair, request_id: str, tokens: int = TOKENS) -> TransferRecord:
    """The record of a request that has been read, as its source knows by then."""
    _, leases = await prefilled(pair, request_id, tokens)
    async with under_way(pair.decode.receive(request_id, pair.decode.take(tokens), (0, tokens))):
        record = await pair.routers[0].wait(await order(pair, request_id))
    await asyncio.gather(*(lease.ended() for lease in leases))
    return record


async def test_a_transfer_appears_and_changes_while_it_is_watched(chrome: Browser, pair: Pair, request_id: str) -> None:
    async with watching(chrome, pair.decode.daemons[0]) as page:
        blocks = await half_published(pair, request_id)
        async with under_way(pair.decode.receive(request_id, pair.decode.take(MANY), (0, MANY))) as receiving:
            await order(pair, request_id)
            await page.until(f"{row(request_id)}?.innerText.includes('for publish')")
            shown = await page.value(f"{row(request_id)}.cells[8].innerText")
            await page.until(f"{row(request_id)}.cells[8].innerText !== {json.dumps(shown)}", "its time goes on")
            await pair.prefill.publish(request_id, blocks, MANY)
            await receiving
        await page.until(f"{row(request_id)}.innerText.includes('done')")
        (record,) = await pair.routers[0].transfers(request_id)
        cells = await page.value(f"[...{row(request_id)}.cells].map((it) => it.innerText)")
        assert cells[3] == "prefill → decode"
        assert cells[4].split() == [record.path, record.transport]
        assert cells[5].split()[1] == "MiB" and abs(float(cells[5].split()[0]) - record.bytes / 2**20) < 0.1
        assert cells[6] == await page.value(f"import('./page/units.js').then((it) => it.rate({record.bytes_per_s}))")
        assert cells[7].strip() == f"rank {record.slowest_rank}"


STATES = "[...document.querySelectorAll('.states button:not([hidden])')].map((it) => it.innerText).join(', ')"
"""JavaScript."""


async def test_search_states_and_sorting_choose_the_rows(chrome: Browser, pair: Pair, request_id: str) -> None:
    large, small = f"{request_id}-large", f"{request_id}-small"
    await moved(pair, large, 4 * TOKENS)
    await moved(pair, small)
    refused = SourceBody(engine_id="nobody", address="127.0.0.1:9")
    async with watching(chrome, pair.decode.daemons[0]) as page:
        await pair.routers[0].order(OrderBody(request_id=f"{request_id}-refused", source=refused, deadline_ms=1))
        await page.type("#search", f"{request_id.upper()} DECODE")
        await page.until("document.querySelectorAll('#rows tr').length === 3")
        await page.until(f"{row(f'{request_id}-refused')}.innerText.includes('failed')")
        await page.until(f"{STATES} === 'all 3, done 2, failed 1'", "the states are counted")
        await page.click(".states .done")
        assert len(await page.texts("#rows tr")) == 2
        for clicks, first in ((1, large), (2, small)):
            await page.click("th.bytes button")
            assert first in (await page.texts("#rows td.request"))[0]
            assert (
                await page.value("document.querySelector('th.bytes').ariaSort")
                == ["descending", "ascending"][clicks - 1]
            )
        await page.type("#search", "no such transfer")
        await page.until("!document.getElementById('no-transfers').hidden")


async def test_equal_failures_are_one_row_which_opens_them(chrome: Browser, pair: Pair, request_id: str) -> None:
    for engine_id, times in (("nobody", 5), ("nobody-else", 1)):
        source = SourceBody(engine_id=engine_id, address="127.0.0.1:9")
        for number in range(times):
            name = f"{request_id}-{engine_id}-{number}"
            await pair.routers[0].order(OrderBody(request_id=name, source=source, deadline_ms=1))
    rows, button = "document.querySelectorAll('#rows tr').length", "document.querySelector('#rows tr.alike button')"
    for size in (PHONE, {}):
        async with watching(chrome, pair.decode.daemons[0], **size) as page:
            await page.type("#search", request_id)
            await page.until(f"{rows} === 2 && {STATES} === 'all 6, failed 6'")
            assert (await page.texts("#rows tr.alike td.request button")) == ["5 requests failed alike open"]
            assert "deadline" in (await page.texts("#rows tr.alike .why"))[0]
            assert "nobody → decode" in (await page.texts("#rows tr.alike"))[0]
            await page.value(f"{button}.click()")
            await page.until(f"{rows} === 7 && {button}.ariaExpanded === 'true'")
            assert len(await page.texts("#rows tr.within a")) == 5
            await page.readable()
            await page.value("document.querySelector('#rows tr.within td.state').click()")
            await page.until("!document.getElementById('detail').hidden")
            assert await page.value("document.querySelectorAll('#rows tr.chosen.within').length") == 1
            await page.value("location.hash = ''")
            await page.value(f"{button}.click()")
            await page.until(f"{rows} === 2")


async def test_a_transfer_links_to_others_that_waited_for_the_same(
    chrome: Browser, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (there,), (here,) = await asyncio.gather(daemons.start("there"), daemons.start("here"))
    source, _ = await engine_on(stack, "source", there)
    reader, router = await engine_on(stack, "reader", here)
    await reads_from(reader, source, f"{request_id}-first")
    ids, late = [f"{request_id}-{part}-{'x' * 80}" for part in ("one", "other")], f"{request_id}-late"
    for each in (*ids, late):
        await stack.enter_async_context(under_way(reader.receive(each, reader.take(50), source=source.source())))
    for each in (*ids, late):
        await waits_longest(router, each, Awaited.PUBLISH)
    for each in ids:
        await published(source, each)
    (one,), (other,) = [await router.transfers(each, wait_s=TIMEOUT_S) for each in ids]
    assert one.waited_longest is not None
    assert others(one.waited_longest, [(other.request_id, other.waited_longest)]) == [other.request_id]
    async with watching(chrome, here, f"#transfer={one.transfer_id}", **PHONE) as page:
        await page.until("!!document.querySelector('#detail .others')")
        assert await page.texts("#detail .others a") == [other.request_id]
        await page.value("document.querySelector('#detail .others a').click()")
        await page.until(f"document.querySelector('#detail h2')?.innerText === {json.dumps(other.request_id)}")
        assert await page.texts("#detail .others a") == [one.request_id]
        await page.readable()
        await published(source, late)
        await page.until(f"document.querySelector('#detail .others').innerText.includes({json.dumps(late)})")


async def test_links_lead_to_what_has_failed_whether_or_not_the_tab_has_loaded_it(
    chrome: Browser, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (there,), (here,) = await asyncio.gather(
        daemons.start("there", 1, "--fence-timeout-s", "0.2"), daemons.start("here")
    )
    source, _ = await engine_on(stack, "source", there)
    _, router = await engine_on(stack, "reader", here)
    nobody, first = SourceBody(engine_id="nobody", address="127.0.0.1:9"), f"{request_id}-0"
    for begin in range(0, 350, 50):
        orders = [OrderBody(request_id=f"{request_id}-{begin + i}", source=nobody, deadline_ms=1) for i in range(50)]
        await asyncio.gather(*(router.order(order) for order in orders))
    (record,) = await router.transfers(first, wait_s=TIMEOUT_S)
    with pytest.raises(KvferryError):
        await router.prewarm(PeerRequest(engine_id="nobody", address="127.0.0.1:9"))
    async with watching(chrome, here, f"#transfer={record.transfer_id}") as page:
        await page.until(f"document.querySelector('#detail h2')?.innerText === {json.dumps(first)}")
        await page.value("location.hash = ''")
        await page.until("document.getElementById('failing').hash.startsWith('#transfer=')")
        await page.click("#failing")
        await page.until("document.querySelector('#detail .problem b')?.innerText === 'deadline'")
        await page.scroll_to("all-peers")
        await page.until("document.getElementById('unmet').innerText.includes('127.0.0.1:9')")
        assert await page.value("document.getElementById('no-peers').hidden")
        await page.readable()
    await never_written(source, request_id)
    async with watching(chrome, there) as page:
        await page.until("document.getElementById('failing').innerText === '1 failure in 5 min'", "the fence is late")
        await page.click("#failing")
        await page.until(f"document.getElementById('leases').innerText.includes({json.dumps(request_id)})")
        assert await page.value("location.hash") == "#leases"


async def test_a_row_opens_its_transfer_with_its_ranks_on_a_timeline(
    chrome: Browser, pair: Pair, request_id: str
) -> None:
    record = await moved(pair, request_id)
    async with watching(chrome, pair.decode.daemons[0]) as page:
        await page.until(f"!!{row(request_id)}")
        await page.value(f"{row(request_id)}.querySelector('td.state').click()")
        await page.until("!document.getElementById('detail').hidden")
        assert await page.texts("#detail h2") == [request_id]
        own = "[...document.querySelector('#detail .timeline').querySelectorAll('.of-rank > span')]"
        assert await page.value(f"{own}.map((it) => it.innerText)") == ["rank 0", "rank 1", "rank 2", ""]
        lanes = "[...document.querySelector('#detail .timeline').querySelectorAll('.lane')]"
        widths = await page.value(f"{lanes}.map((it) => [...it.children].map((i) => i.className))")
        assert all({"waiting", "reading"} <= set(parts) for parts in widths)
        ranks = await page.value(
            "[...document.querySelector('#detail tbody').rows].map((it) => [it.className, it.cells[3].innerText])"
        )
        assert [int(runs.replace(",", "")) for _, runs in ranks] == [share.descriptors for share in record.ranks]
        assert [name for name, _ in ranks].index("slow") == record.slowest_rank
        assert record.transfer_id in (await page.texts("#detail .pairs"))[0]
        assert await page.texts("#detail .why") == ([f"It {record.why_slow}."] if record.why_slow else [])
        found = "[...document.querySelectorAll('#peers .worst')].some((it) => it.textContent.includes(%s))"

        async def as_told() -> object:
            """The page says what the daemon says now: the worst of five minutes ago is that no longer."""
            worst = max(
                (times.worst_ms, name)
                for peer in await pair.routers[0].peers() if peer.engine_id == "prefill"
                for name, times in peer.phases.items()
            )[1]  # fmt: skip
            return await page.value(found % json.dumps(f"slowest of 5 min: {worst} "))

        await page.scroll_to("all-peers")  # it asks for peers while they are in view
        await until(as_told, "the page tells another phase than the daemon")
        await page.ask("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        await page.until("document.getElementById('detail').hidden")
    # The daemon is asked, and a browser says in red that it answers 404.
    async with chrome.page(f"{pair.decode.daemons[0].url}/#transfer={'0' * 32}") as page:
        await page.until("document.getElementById('detail').innerText.includes('does not know')")


async def test_the_sources_half_is_shown_by_the_sources_clock(chrome: Browser, pair: Pair, request_id: str) -> None:
    record = await moved(pair, request_id)
    half = await pair.routers[0].source_half(record.transfer_id)
    assert half.why == "" and [each.rank for each in half.ranks] == [0, 1]
    reads = []
    for each in half.ranks:
        lease = each.lease
        assert lease is not None and lease.shown_ms is not None
        assert (lease.request_id, lease.lease, lease.state) == (request_id, record.lease, "released")
        for it in lease.readers:
            assert (it.engine_id, it.state) == ("decode", "read")
            assert it.closed_ms is not None and lease.shown_ms <= it.closed_ms <= lease.age_ms
            assert it.opened_ms is None or it.opened_ms <= it.closed_ms
            reads.append((each.rank, it.rank))
    assert {reader for _, reader in reads} == {0, 1, 2}
    async with watching(chrome, pair.decode.daemons[0], f"#transfer={record.transfer_id}", **PHONE) as page:
        await page.until("document.querySelectorAll('#detail .timeline').length === 2")
        lanes = "[...document.querySelectorAll('#detail .timeline')[1].querySelectorAll('.of-rank > span')]"
        said = await page.value(f"{lanes}.map((it) => it.innerText)")
        assert said == [*(f"{rank} → {reader}" for rank, reader in reads), ""]
        await page.readable()
        asked = [each for each in page.requested if each.endswith("/source")]
        assert len(asked) == 1, "once, and by this daemon"


async def test_the_sources_half_has_when_it_had_published_packed_and_was_read(
    chrome: Browser, daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    flags = "--way", "staged", "--arena-mb", "4"
    (there,), (here,) = await asyncio.gather(daemons.start("there", 1, *flags), daemons.start("here", 1, *flags))
    source, _ = await engine_on(stack, "source", there)
    reader, router = await engine_on(stack, "reader", here)
    for lease in await reads_from(reader, source, request_id):
        await lease.ended()
    (record,) = await router.transfers(request_id)
    (half,) = (await router.source_half(record.transfer_id)).ranks
    assert half.lease is not None
    (it,) = half.lease.readers
    times = half.lease.shown_ms, it.packed_ms, it.closed_ms
    assert None not in times and list(times) == sorted(times)  # type: ignore[type-var]
    async with watching(chrome, here, f"#transfer={record.transfer_id}", **PHONE) as page:
        await page.until("document.querySelectorAll('#detail .timeline').length === 2")
        cells = "Object.fromEntries([...document.querySelectorAll('#detail table')].at(-1).querySelectorAll('tbody td')"
        said = await page.value(f"{cells}.values().map((it) => [it.dataset.name, it.innerText]))")
        assert {each: said[each] for each in ("rank", "read by")} == {"rank": "0", "read by": "rank 0"}
        assert all(re.match(r"[\d.]+ (µs|ms|s)$", said[each]) for each in ("published", "packed", "closed")), said
        await page.readable()


async def test_a_source_that_does_not_say_is_not_said_to_have_moved_nothing(
    chrome: Browser, pair: Pair, daemons: Daemons, request_id: str
) -> None:
    (daemon,) = await daemons.start("half-gone", 1, "--no-share-rest")
    source = await TestEngine.start("half-gone", [daemon], Shape.tp(1))
    await reads_from(pair.decode, source, request_id)
    assert {each.rest for each in await pair.routers[0].peers() if each.engine_id == "half-gone"} == {""}
    daemon.process.kill()
    await asyncio.to_thread(daemon.process.wait)
    record = (await pair.routers[0].transfers(request_id))[0]
    async with watching(chrome, pair.decode.daemons[0], f"#transfer={record.transfer_id}") as page:
        await page.until("/does not say: |is not known: /.test(document.getElementById('detail').innerText)")
        assert await page.value("document.querySelectorAll('#detail .timeline').length") == 1
    await source.close()


async def test_a_failure_is_told_with_its_remedy(chrome: Browser, pair: Pair, request_id: str) -> None:
    source = SourceBody(engine_id="nobody", address="127.0.0.1:9")
    async with under_way(pair.decode.outcomes(request_id, pair.decode.take(TOKENS), (0, TOKENS))):
        ordered = await pair.routers[0].order(OrderBody(request_id=request_id, source=source))
        record = await pair.routers[0].wait(ordered.transfer_id)
    assert record.error is not None
    async with watching(chrome, pair.decode.daemons[0], f"#transfer={record.transfer_id}", **PHONE) as page:
        await page.until("!!document.querySelector('#detail .problem')")
        said = (await page.texts("#detail .problem"))[0]
        assert record.error.code in said and record.error.message in said and record.error.remedy in said


async def test_peers_are_a_matrix_and_the_plan_is_drawn(chrome: Browser, pair: Pair) -> None:
    await pair.routers[0].prewarm(PeerRequest(engine_id="prefill", address=pair.prefill.address))
    async with watching(chrome, pair.decode.daemons[0]) as page:
        await page.scroll_to("all-peers")
        await page.until("[...document.querySelectorAll('.who h3')].some((it) => it.innerText === 'prefill')")
        cells = "[...document.querySelectorAll('.peer')].find((it) => it.querySelector('h3').innerText === 'prefill')"
        ranks = await page.value(f"[...{cells}.querySelectorAll('.rank')].map((it) => it.innerText)")
        assert ["rank 0" in ranks[0], "rank 1" in ranks[1], len(ranks)] == [True, True, 2]
        assert [daemon.peer in said for daemon, said in zip(pair.prefill.daemons, ranks, strict=True)] == [True, True]
        links = await page.value(f"[...{cells}.querySelectorAll('.rank a')].map((it) => [it.innerText, it.href])")
        assert links == [[daemon.peer, f"{daemon.url}/"] for daemon in pair.prefill.daemons]
        await page.value(f"{cells}.querySelector('.who a').click()")
        await page.until("document.querySelectorAll('#plan .ribbon').length === 4", "two ranks that give, four ribbons")
        told = await page.value(
            "[...document.querySelectorAll('#plan tbody tr')].map((it) => it.innerText.split('\\t'))"
        )
        heads = [(reader, source.strip(), share) for reader, source, names, _, share, *_ in told if names == "k, v"]
        assert heads == [
            ("rank 0", "rank 0", "head 0–1 of 6"), ("rank 1", "rank 0", "head 2 of 6"),
            ("rank 1", "rank 1", "head 3 of 6"), ("rank 2", "rank 1", "head 4–5 of 6"),
        ]  # fmt: skip
        # Each map shows as much of the axis as its rank reads, in the colour of whom it reads it from.
        parts = await page.value("document.querySelectorAll('#plan .part').length")
        assert parts == 2 * 2 * 4, "k and v, and the state, of four shares on both sides"
        await page.click("#plan .close")
        await page.until("document.getElementById('plan').hidden")


async def test_a_source_shows_what_it_serves_and_to_whom(chrome: Browser, pair: Pair, request_id: str) -> None:
    record = await moved(pair, request_id)
    async with watching(chrome, pair.prefill.daemons[0]) as page:
        await page.scroll_to("leases")
        lease = f"[...document.querySelectorAll('#leases tr')].find((it) => it.innerText.includes({request_id!r}))"
        await page.until(f"{lease}?.innerText.includes('released')")
        said, number = await page.value(f"{lease}.innerText"), pair.prefill.lease(request_id)
        assert "decode rank 0–2 read" in said and f"attempt {record.attempt}" in said and f"lease {number}" in said
        await page.scroll_to("all-peers")
        await page.until("document.querySelector('#inbound').innerText.includes('decode rank 2 of 3')")
        totals = "[...document.querySelectorAll('#totals div')].find((it) => it.innerText.includes('served')).innerText"
        assert not (await page.value(totals)).endswith("\n0 B")


async def test_it_asks_for_what_is_new_and_for_what_is_seen(chrome: Browser, pair: Pair, request_id: str) -> None:
    for name in "ab":
        await moved(pair, f"{request_id}-{name}")
    async with watching(chrome, pair.decode.daemons[0], height=400) as page:
        await page.value("document.getElementById('rows').style.height = '9000px'")
        await page.until("document.getElementById('all-peers').getBoundingClientRect().top > 1000")
        await page.until("document.querySelectorAll('#facts div').length > 3")
        page.requested.clear()

        def times(path: str) -> int:
            return sum(path in address for address in page.requested)

        async def thrice() -> bool:
            return times("/v1/transfers") >= 3

        await until(thrice, "it asks again and again")
        assert all("since=" in address for address in page.requested if "/v1/transfers" in address)
        assert not [each for each in page.requested if each.endswith("/v1/engines") or "/v1/leases" in each]
        await page.scroll_to("engines")
        await page.until("document.querySelector('#engines h3')?.innerText === 'decode'")
        assert len([each for each in page.requested if each.endswith("/v1/engines")]) == 1, "the manifests, once"


async def test_it_says_what_memory_is_held_and_where_the_other_ranks_are(chrome: Browser, pair: Pair) -> None:
    (engine,) = await pair.routers[0].engines()
    async with watching(chrome, pair.decode.daemons[0]) as page:
        await page.scroll_to("engines")
        await page.until("document.querySelector('#engines h3')?.innerText === 'decode'")
        (card,) = await page.texts("#engines .card")
        assert f"{say.size(engine.cache_bytes)} of cache" in card
        links = await page.value("[...document.querySelectorAll('#engines a')].map((it) => [it.innerText, it.href])")
        assert links == [[f"rank {rank}", f"{pair.decode.daemons[rank].url}/"] for rank in (1, 2)]
        assert all(f"at {daemon.peer}" in card for daemon in pair.decode.daemons[1:])
        said = "[...document.querySelectorAll('#totals div')].find((it) => it.innerText.includes('process'))"
        assert (await page.value(f"{said}.innerText")).endswith("MiB\nmemory")


async def test_a_phone_shows_all_of_it_in_readable_colours(chrome: Browser, pair: Pair, request_id: str) -> None:
    long = f"{request_id}-{'x' * 80}"
    record = await moved(pair, long)
    source = SourceBody(engine_id="nobody", address="127.0.0.1:9")
    await pair.routers[0].order(OrderBody(request_id=f"{long}-failed", source=source, deadline_ms=1))
    async with watching(chrome, pair.decode.daemons[0], "#plan=prefill", **PHONE) as page:
        await page.type("#search", request_id)
        await page.until("document.querySelectorAll('#rows tr.failed').length === 1")
        await page.until("!!document.querySelector('#plan svg')")
        for id in ("all-peers", "leases", "engines"):
            await page.scroll_to(id)
            await page.until(f"document.getElementById({id!r}).childElementCount > 0")
        for fragment in ("", f"#transfer={record.transfer_id}"):
            await page.value(f"location.hash = {fragment!r}")
            await page.until(f"document.getElementById('detail').hidden === {str(not fragment).lower()}")
            assert await page.value("document.documentElement.scrollWidth") == PHONE["width"]
            await page.readable()


MARKS = "[...document.querySelectorAll('#marks li')].map((it) => it.innerText).join(' | ')"
"""JavaScript."""


async def test_since_when_is_drawn_with_what_happened_to_the_daemon(
    chrome: Browser, pair: Pair, own_fleet: Fleet, request_id: str
) -> None:
    kept = own_fleet.daemon("kept", kept=True)
    await own_fleet.ready(kept, timeout_s=TIMEOUT_S)
    engine = await TestEngine.start("kept", [kept], Shape.tp(1))
    async with RouterClient(kept.url) as router, chrome.page(kept.url, **PHONE) as page:
        kv, _ = await prefilled(pair, request_id)
        await engine.gets(request_id, kv, source=pair.prefill.source())
        nobody = SourceBody(engine_id="nobody", address="127.0.0.1:9")
        await router.order(OrderBody(request_id=f"{request_id}-fails", source=nobody, deadline_ms=1))
        await router.order(OrderBody(request_id=f"{request_id}-waits", source=nobody, deadline_ms=60000))
        await page.until(f"{row(f'{request_id}-waits')}?.innerText.includes('for reservation')")
        await page.until("document.querySelectorAll('#bytes rect.read').length === 1")
        assert await page.value("document.querySelectorAll('#latency rect.p50, #latency rect.p99').length") == 2
        await page.until("document.querySelectorAll('#failures rect.failed').length === 1")
        assert "1 of 2 deadline 1" in " ".join((await page.texts("#failures figcaption"))[0].split())
        assert (await page.texts("#marks li"))[0].endswith(" started")
        for process in psutil.Process(kept.process.pid).children():
            process.kill()
        await page.until(f"{MARKS}.includes(' died, started it was ended by SIGKILL')")
        await page.until("!!document.querySelector('#failures .mark.death')", "in red")
        await page.until("document.getElementById('failing').innerText === '2 failures in 5 min'")
        for name, bars in (("24 h", 1), ("1 h", 1), ("5 min", 1)):
            await page.click(f"#ranges button[value='{name}']")
            await page.until(f"document.querySelectorAll('#bytes rect.read').length === {bars}")
            assert await page.value("document.querySelectorAll('#bytes rect.unseen')[0].width.baseVal.value > 0")
            await page.readable()
        await page.click("#failing")
        await page.until(f"{row(f'{request_id}-waits')}?.innerText.includes('daemon_died')", "it died with the daemon")
        waits = await page.value(f"{row(f'{request_id}-waits')}.link.hash")
        assert "daemon_died" in (await router.transfer(waits.partition("=")[2])).model_dump_json()
        assert len(await page.texts("#rows tr")) == 2
        await router.drain()
        await page.until(f"{MARKS}.includes('drain')")
        kept.signal(signal.SIGHUP)
        await page.until(f"{MARKS}.includes('upgraded')")
    await engine.close()


async def test_text_of_others_stays_text(chrome: Browser, pair: Pair) -> None:
    evil = f"<img src=//evil.example/x onerror=alert(1)>\"'&{uuid.uuid4().hex[:6]}"
    source = SourceBody(engine_id="<script>alert(1)</script>", address="127.0.0.1:9")
    ordered = await pair.routers[0].order(OrderBody(request_id=evil, source=source, deadline_ms=1))
    await pair.routers[0].wait(ordered.transfer_id)
    async with watching(chrome, pair.decode.daemons[0], f"#transfer={ordered.transfer_id}") as page:
        await page.until("document.querySelector('#detail h2')?.innerText.length > 9")
        assert await page.texts("#detail h2") == [evil]
        assert source.engine_id in (await page.texts("#detail .pairs"))[0]
        assert await page.value("document.querySelectorAll('#rows img, #detail img, body script').length") == 0
        assert page.faults == []
        refused = await page.value("try { document.body.innerHTML = '<p>'; } catch (error) { `${error}` }")
        assert "TrustedHTML" in refused
        page.faults.clear()  # the browser said that in red as well


async def test_a_token_is_asked_for_and_goes_with_every_question(
    chrome: Browser, daemons: Daemons, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("the-token")
    (daemon,) = await daemons.start("guarded", 1, "--token-file", str(token))
    async with chrome.page(daemon.url) as page:
        await page.until("!document.getElementById('login').hidden")
        assert await page.value("document.getElementById('content').hidden")
        for given, then in (("wrong", "!!document.getElementById('refused').innerText"),
                            ("the-token", "!document.getElementById('content').hidden")):  # fmt: skip
            await page.type("#token", given)
            await page.click("#login button")
            await page.until(then)
        assert await page.value("document.getElementById('login').hidden")
        assert await page.value("[document.cookie, localStorage.length, location.search]") == ["", 0, ""]
        assert not [each for each in page.requested if not each.startswith(f"{daemon.url}/") or "the-token" in each]
        # A browser says in red that there was no token. Nothing else is.
        assert not [fault for fault in page.faults if "status of 401" not in fault]


async def test_a_daemon_that_has_gone_is_said_to_be(chrome: Browser, daemons: Daemons) -> None:
    (daemon,) = await daemons.start("gone")
    engine = await TestEngine.start("gone", [daemon], Shape.tp(1))
    async with RouterClient(daemon.url), chrome.page(daemon.url) as page:
        await page.until("document.getElementById('ready').innerText === 'ready'")
        daemon.process.kill()
        await asyncio.to_thread(daemon.process.wait)
        await page.until("document.body.classList.contains('stale')")
        assert "does not answer" in (await page.texts("#reasons"))[0]
        assert await page.texts("#ready") == ["not ready"]
    await engine.close()
