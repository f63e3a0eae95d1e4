"""Headless Chromium, spoken to over its DevTools protocol: two pipes, and JSON with a zero byte after each message."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fleet import TIMEOUT_S, until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LARGEST = 1 << 26
"""Bytes of one message: a screenshot is some hundred KB."""
COMMAND = [
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--no-proxy-server", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
]  # fmt: skip

STARTS = 3
"""How often Chromium is started for one page."""
PHONE = {"width": 390, "height": 844}
CLIPPED = """
[...document.querySelectorAll('body *')].filter((it) => {
  if (!it.getClientRects().length || it.closest('svg')) return false;
  const { left, right } = it.getBoundingClientRect();
  const style = getComputedStyle(it), hides = style.overflowX !== 'visible' && it.scrollWidth > it.clientWidth + 1;
  return left < -1 || right > innerWidth + 1 || (hides && it.tagName !== 'INPUT' && it.tagName !== 'SELECT');
}).map((it) => `${it.tagName}.${it.className} ${it.textContent.slice(0, 60)}`)
"""
"""Elements that reach out of the window, or hide a part of what they hold."""
CONTRASTS = """
[...document.querySelectorAll('body *')].filter((it) => it.getClientRects().length && !it.closest('svg')
  && [...it.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())).map((it) => {
  const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 });
  const paint = canvas.getContext('2d', { willReadFrequently: true });
  const light = (colours) => {
    for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const under = [];
  for (let at = it; at; at = at.parentElement) under.unshift(getComputedStyle(at).backgroundColor);
  const pair = [light(under), light([...under, getComputedStyle(it).color])].sort((a, b) => b - a);
  return [(pair[0] + 0.05) / (pair[1] + 0.05), it.textContent];
}).filter(([ratio]) => ratio < 4.5)
"""
"""Texts that differ less from what is behind them than WCAG asks for, and by how much."""


class BrowserEnded(AssertionError):
    """Chromium has ended by itself."""


class Browser:
    """Make it with `browser`. A Chromium that has ended before a page is loaded is started again: on a loaded machine
    its helpers may not come up in the time that it gives them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)
        self._starts = itertools.count(1)
        self._running: Running | None = None
        self.pages: dict[str, Page] = {}

    async def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        assert self._running is not None
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        return await asyncio.wait_for(self._running.ask(message), TIMEOUT_S)

    def _told(self, message: dict[str, Any]) -> None:
        if (page := self.pages.get(message.get("sessionId", ""))) is not None:
            page.told(message["method"], message["params"])

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.close()

    async def _tab(self) -> tuple[str, str]:
        """An empty tab: its context, and its session."""
        for left in reversed(range(STARTS)):
            try:
                if self._running is None:
                    name = f"chromium-{next(self._starts)}"
                    self._running = await Running.start(self._directory, name, self._told)
                context = (await self.ask("Target.createBrowserContext"))["browserContextId"]
                blank = await self.ask("Target.createTarget", url="about:blank", browserContextId=context)
                attached = await self.ask("Target.attachToTarget", targetId=blank["targetId"], flatten=True)
            except BrowserEnded:
                await self.close()
                if not left:
                    raise
            else:
                return context, attached["sessionId"]
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def page(self, url: str, *, width: int = 1400, height: int = 900, scale: float = 1) -> AsyncIterator[Page]:
        """A tab of a session of its own, with the page loaded."""
        context, session = await self._tab()
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.ask(f"{domain}.enable")
        phone = width < 700
        await page.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        await page.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.ask("Page.navigate", url=url)
        await page.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")
        try:
            yield page
        finally:
            await self.ask("Target.disposeBrowserContext", browserContextId=context)
            del self.pages[session]

    @asynccontextmanager
    async def watching(self, url: str, path: str = "", **more: Any) -> AsyncIterator[Page]:
        """A page of ours, with its first answers drawn. Nothing may be red in its console, nothing asked of anybody
        but this url."""
        async with self.page(f"{url}/{path}", **more) as page:
            await page.until("!document.getElementById('content').hidden")
            yield page
            assert page.faults == []
            assert [address for address in page.requested if not address.startswith(f"{url}/")] == []


class Page:
    """One tab. `faults`: what a developer would see in red. `requested`: every address it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.faults: list[str] = []
        self.requested: list[str] = []

    def told(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            thrown = about["exceptionDetails"]
            self.faults.append(thrown.get("exception", {}).get("description") or thrown["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.faults.append(str(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.faults.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requested.append(about["request"]["url"])

    async def ask(self, method: str, **params: Any) -> Any:
        return await self._browser.ask(method, self._session, **params)

    async def value(self, expression: str) -> Any:
        """The value that JavaScript makes of it, as JSON has it."""
        answer = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]["exception"]["description"]
        return answer["result"].get("value")

    async def until(self, expression: str, what: str = "") -> None:
        await until(lambda: self.value(expression), f"{what or expression}; faults: {self.faults}")

    async def texts(self, selector: str) -> list[str]:
        """The text that each of these elements shows."""
        shown: list[str] = await self.value(f"[...document.querySelectorAll({selector!r})].map((it) => it.innerText)")
        return shown

    async def click(self, selector: str) -> None:
        await self.value(f"document.querySelector({selector!r}).click()")

    async def scroll_to(self, id: str) -> None:
        """Sections are asked for while they are seen, and what stands above them may be long."""
        await self.value(f"document.getElementById({id!r}).scrollIntoView()")

    async def type(self, selector: str, text: str) -> None:
        """In place of what is there."""
        await self.value(f"{{ const it = document.querySelector({selector!r}); it.focus(); it.select(); }}")
        await self.ask("Input.insertText", text=text)

    async def readable(self) -> None:
        """Nothing is cut off, and every text stands out from what is behind it, in dark colours and in light ones."""
        assert await self.value(CLIPPED) == []
        for scheme in ("dark", "light"):
            await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            light = await self.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128")
            assert light is (scheme == "light")
            assert await self.value(CONTRASTS) == []

    async def screenshot(self, file: Path, *, whole: bool = False) -> None:
        clip = {}
        if whole:
            size = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
            clip = {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        taken = await self.ask("Page.captureScreenshot", format="png", **clip)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(taken["data"]))


class Running:
    """A Chromium: its process, and the pipes to it. `close` ends it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, told: Callable[[dict[str, Any]], None]) -> None:
        self._process, self._log, self._told = process, log, told
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._ended: BrowserEnded | None = None
        self._closing = AsyncExitStack()
        self._closing.push_async_callback(self._kill)
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def start(cls, directory: Path, name: str, told: Callable[[dict[str, Any]], None]) -> Running:
        """told: is called with each message that answers no question."""
        assert CHROMIUM is not None
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        # It reads from descriptor 3 and writes to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *COMMAND]
        log = directory / f"{name}.log"
        with log.open("wb") as written:
            process = await asyncio.create_subprocess_exec(
                *command, f"--user-data-dir={directory / name}", "about:blank",
                stdin=asyncio.subprocess.DEVNULL, stdout=written, stderr=written,
                pass_fds=(theirs_in, theirs_out), start_new_session=True,
            )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        running = cls(process, log, told)
        await running._connect(ours_in, ours_out)
        return running

    async def _connect(self, ours_in: int, ours_out: int) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LARGEST)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
        )
        self._closing.callback(reading.close)
        writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours_out, "wb"))
        self._closing.callback(writing.close)
        self._writer = asyncio.StreamWriter(writing, protocol, None, loop)
        listening = asyncio.create_task(self._listen(reader))
        self._closing.callback(listening.cancel)

    def ask(self, message: dict[str, Any]) -> asyncio.Future[Any]:
        if self._ended is not None:
            raise self._ended
        assert self._writer is not None
        future = self._asked[message["id"]] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        return future

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Until it ends."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if (future := self._asked.pop(message.get("id", 0), None)) is None:
                    self._told(message)
                elif not future.done():
                    if "error" in message:
                        future.set_exception(AssertionError(message["error"]["message"]))
                    else:
                        future.set_result(message["result"])
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), TIMEOUT_S)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        self._ended = BrowserEnded(f"Chromium has ended with {self._process.returncode}; its log:\n{tail}")
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self._ended)

    async def close(self) -> None:
        await self._closing.aclose()

    async def _kill(self) -> None:
        """It and its helpers, which end with it: one process group. The number may be another's once it has ended."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Browser]:
    """directory: for profiles and logs."""
    started = Browser(directory)
    try:
        yield started
    finally:
        await started.close()
