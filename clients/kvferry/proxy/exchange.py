"""A request on its way through both legs, and what is freed when it fails.

Until decode's first byte has come, every failure has an HTTP status of its own. An early end (a refusal of decode, a
failed order, a client that left) goes through `_clean_up`: both sides abort at once, so that prefill's blocks are not
held until the lease's ttl.
"""

from __future__ import annotations

import asyncio
import logging
import string
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.asgi import disconnected
from kvferry.errors import Deadline, Full, KvferryError, PeerFailed, Unavailable
from kvferry.proxy import legs
from kvferry.proxy.answer import Answer, passed_on, whole
from kvferry.proxy.options import Endpoint, Options
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, Ordered

log = logging.getLogger("kvferry.proxy")
ABORT_TIMEOUT_S = 5.0
RETRIED = (502, 503, 504)
"""Answers that another engine may cure; all others go to the client unchanged."""
ELSEWHERE = ("engine_unreachable", "daemon_unreachable", "client_full", "draining")
"""Errors of a decode engine, or of its daemon, that do not concern another one."""
GRACE_S = 2.0
"""When a client leaves: how long prefill's answer is still awaited, for the lease's name in it, and an order under way,
which the abort must not overtake."""


class Daemons:
    """REST clients of all daemons, the requests that may hold something there, and the aborts that are under way."""

    def __init__(self, options: Options) -> None:
        urls = {url for endpoint in options.prefill + options.decode for url in endpoint.daemons}
        token, tls = options.daemon_token, options.daemon_tls  # all share it: to make one takes long
        self.clients = {url: RouterClient(url, token=token, timeout_s=ABORT_TIMEOUT_S, tls=tls) for url in urls}
        self._under_way: set[asyncio.Task[Any]] = set()

    async def order(
        self, decode: Endpoint, body: OrderBody, *, timeout_s: float, traceparent: str = "", x_request_id: str = ""
    ) -> Ordered:
        """Order at rank 0's daemon. A full daemon is asked again after its Retry-After, within `timeout_s`.

        Raises KvferryError: the daemon's own, `daemon_unreachable` or `daemon_timeout`.
        """
        client = self.clients[decode.daemons[0]]
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await client.order(body, traceparent=traceparent, x_request_id=x_request_id)
            except DaemonError as error:
                pause_s = error.retry_after_s or 0.1
                if error.status != 429 or time.monotonic() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)
            except TimeoutError as error:
                raise Deadline(
                    "daemon_timeout", f"the decode daemon at {client.url} took no order within {timeout_s:g} s",
                    field="--order-timeout", value=timeout_s, remedy="see its log, or allow more with --order-timeout",
                ) from error  # fmt: skip

    async def free(self, endpoint: Endpoint, request_id: str) -> None:
        """Abort the request at every daemon of an engine. Failures are logged: the lease's ttl frees it then."""
        await asyncio.gather(*(self._abort(self.clients[url], request_id) for url in endpoint.daemons))

    async def _abort(self, client: RouterClient, request_id: str) -> None:
        try:
            result = await client.abort_request(request_id)
        except KvferryError as error:
            what = "request %s: not aborted at %s, its blocks are held until the lease's ttl: %s"
            log.warning(what, request_id, client.url, error)
            return
        log.info(
            "request %s: aborted at %s: transfers=%d leases=%d",
            request_id, client.url, result.transfers_ended, result.leases_ended,
        )  # fmt: skip

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run to its end though the client that caused it has left. `close` waits for it."""
        self.expect(asyncio.create_task(work))

    def expect(self, task: asyncio.Task[Any] | None) -> None:
        """It may still free something: `close` waits for it."""
        assert task is not None
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Let requests that the proxy's stop has cut off, and aborts, end; each is bounded."""
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * ABORT_TIMEOUT_S):
                while self._under_way:
                    await asyncio.wait(self._under_way)
        for client in self.clients.values():
            await client.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """The client's request. `headers` go to both legs, with `handover_id` as X-Request-Id."""

    path: str
    body: legs.JsonObject
    headers: httpx.Headers
    request_id: str
    """The client's: in its answer and in the log."""
    handover_id: str


class Exchange(Response):
    """The answer to a request: runs as long as the client stays, and cleans up after itself either way.

    prefills, decodes: the engines to try, in this order.
    """

    def __init__(
        self, asked: Asked, prefills: Sequence[Endpoint], decodes: Sequence[Endpoint], options: Options,
        http: httpx.AsyncClient, daemons: Daemons,
    ) -> None:  # fmt: skip
        super().__init__()
        self._asked = asked
        self._prefills, self._decodes = prefills[: options.prefill_attempts], decodes[: options.decode_attempts]
        self._options, self._http, self._daemons = options, http, daemons
        self._began = time.monotonic()
        self._timings_ms: dict[str, float] = {}
        self._error: KvferryError | None = None
        self._tried: list[Endpoint] = []
        self._params: legs.JsonObject | None = None
        self._prefilling: asyncio.Task[Response | None] | None = None
        self._decodes_tried: list[Endpoint] = []
        self._orderings: list[asyncio.Task[Ordered]] = []
        self._alone = False
        """No prefill engine has answered, and decode computes the prompt itself."""
        self._settled = False
        """Nothing is left to free: decode answered to the end, or prefill published nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._daemons.expect(asyncio.current_task())
        answer = Answer(send)
        serving = asyncio.create_task(self._serve(answer))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answer.complete:  # uvicorn reports a disconnect after a complete answer, too
                await asyncio.wait({serving}, timeout=1.0)
        finally:
            serving.cancel()
            leaving.cancel()
            # Cancelled first, so that decode's connection is closed before the daemons abort.
            await asyncio.wait({serving, leaving})
            self._finish(answer, left=serving.cancelled())
        if not serving.cancelled():
            serving.result()

    def _finish(self, answer: Answer, *, left: bool) -> None:
        """Log the request, and free what the exchange holds. Called once the client has its answer or has left."""
        outcome = "complete" if answer.complete else "client_left" if left and not self._error else "broken"
        log.info(
            "request %s as %s: %s %s status=%d bytes=%d prefill=%s decode=%s ms=%s%s",
            self._asked.request_id, self._lease, self._asked.path, outcome, answer.status, answer.nbytes,
            " ".join(each.url for each in self._tried), " ".join(each.url for each in self._decodes_tried),
            self._timings_ms,
            f" error={self._error.code}: {self._error}" if self._error else "",
        )  # fmt: skip
        if not self._settled or len(self._tried) > 1 or len(self._decodes_tried) > 1 or self._alone:
            self._daemons.in_background(self._clean_up())

    async def _serve(self, answer: Answer) -> None:
        """Answer the client. Raises nothing of what can go wrong behind the proxy."""
        try:
            # Shielded: _clean_up may still want its answer when the client has left.
            self._prefilling = asyncio.create_task(self._prefill())
            refused = await asyncio.shield(self._prefilling)
            self._mark("prefill")
            if refused:
                self._settled = True
                await answer.whole(refused)
            else:
                await self._decode(answer)
        except KvferryError as error:
            self._error = error
            await answer.fail(error)

    async def _prefill(self) -> Response | None:
        """Ask prefill engines in order until one answers with anything but 502, 503 or 504; the last answer counts.

        Keeps what was published in `_params`. Returns a refusal for the client. Raises KvferryError: what `leg` and
        `published` raise.
        """
        body = legs.encode(legs.prefill_body(self._asked.body))
        for endpoint in self._prefills:
            self._tried.append(endpoint)
            last = await self._ask_prefill(endpoint, body)
            if isinstance(last, httpx.Response) and last.status_code not in RETRIED:
                break
        else:
            if self._options.when_no_prefill == "recompute":
                self._alone = True
                log.warning("request %s: no prefill engine answers, decode computes it alone", self._asked.request_id)
                return None
        if isinstance(last, KvferryError):
            raise last
        if last.status_code >= 400:
            return await whole(last)
        self._params = legs.published(last)
        return None

    async def _ask_prefill(self, endpoint: Endpoint, body: bytes) -> httpx.Response | KvferryError:
        """Its answer, or why there is none. Each engine has the time of a whole leg: one that hangs takes none of
        another's. Raises KvferryError (`full`)."""
        try:
            async with leg("prefill", endpoint, self._options.prefill_timeout_s):
                return await self._http.post(**self._request(endpoint, body))
        except (Deadline, Unavailable) as error:
            return error

    def _request(self, endpoint: Endpoint, body: bytes) -> dict[str, Any]:
        return {"url": endpoint.url + self._asked.path, "content": body, "headers": self._asked.headers}

    async def _decode(self, answer: Answer) -> None:
        """Ask decode engines in order until one begins to answer. Raises KvferryError: the last one's."""
        for endpoint in self._decodes:
            self._decodes_tried.append(endpoint)
            try:
                if await self._decode_at(endpoint, answer):
                    return
            except KvferryError as error:
                if answer.status or endpoint is self._decodes[-1] or error.code not in ELSEWHERE:
                    raise
                log.warning("request %s: %s; another decode engine is asked", self._asked.request_id, error)

    async def _decode_at(self, endpoint: Endpoint, answer: Answer) -> bool:
        """False when another engine is to be asked."""
        ordered = self._params is not None and self._options.order == "router"
        body = legs.encode(legs.decode_body(self._asked.body, self._params, ordered=ordered))
        ordering: asyncio.Task[Ordered] | None = None
        if ordered:
            assert self._params is not None
            order, headers = legs.order(self._params), self._asked.headers
            placing = self._daemons.order(
                endpoint, order, timeout_s=self._options.order_timeout_s,
                traceparent=headers.get("traceparent", ""), x_request_id=headers["x-request-id"],
            )  # fmt: skip
            ordering = asyncio.create_task(placing)
            self._orderings.append(ordering)
        relaying = asyncio.create_task(self._relay(endpoint, body, answer))
        try:
            if ordering is not None:
                await asyncio.wait({ordering, relaying}, return_when=asyncio.FIRST_COMPLETED)
                if ordering.done() and not answer.status and not relaying.done():
                    ordering.result()
                    self._mark("order")
            answered = await relaying
        finally:
            relaying.cancel()
            await asyncio.wait({relaying})
        # An order that was not taken by the end of a good answer was not needed, and must not outlive it.
        self._settled = self._params is None or (answered and (ordering is None or _succeeded(ordering)))
        return bool(answer.status)

    async def _relay(self, endpoint: Endpoint, body: bytes, answer: Answer) -> bool:
        """Pass decode's answer on, byte for byte. False when it is a refusal, which the client gets unless another
        engine may cure it."""
        async with (
            leg("decode", endpoint, self._options.decode_timeout_s),
            self._http.stream("POST", **self._request(endpoint, body)) as response,
        ):
            if response.status_code in RETRIED and endpoint is not self._decodes[-1]:
                return False
            if response.status_code >= 400:
                self._error = PeerFailed("decode_refused", f"decode answered {response.status_code}")
                await answer.whole(await whole(response))
                return False
            # An engine may name a lease with characters that no header has: those are written as in a URL.
            lease = quote(self._lease, safe=string.punctuation).encode()
            headers = [*passed_on(response), (b"x-kvferry-request-id", lease)]
            async for chunk in response.aiter_raw():
                if not answer.status:
                    self._mark("first_byte")
                    await answer.start(response.status_code, headers)
                await answer.write(chunk)
            if not answer.status:
                await answer.start(response.status_code, headers)
        await answer.end()
        self._mark("decode")
        return True

    def _mark(self, phase: str) -> None:
        """Milliseconds from the request's arrival."""
        self._timings_ms[phase] = round((time.monotonic() - self._began) * 1e3, 1)

    @property
    def _lease(self) -> str:
        """The name that prefill gave the lease; before, the id that the request went in with is the best guess."""
        return legs.lease_name(self._params) or self._asked.handover_id

    async def _clean_up(self) -> None:
        """Free what the request may hold on either side. Bounded; failures are logged."""
        waited = [*([] if self._params else [self._prefilling]), *self._orderings]
        for task in waited:
            if task is not None:
                await asyncio.wait({task}, timeout=GRACE_S)
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
                _succeeded(task)
        for endpoint in self._decodes_tried[:-1] if self._settled else self._decodes_tried:
            await self._daemons.free(endpoint, self._lease)
        if not self._settled:
            for endpoint in self._tried[-1:]:
                await self._daemons.free(endpoint, self._lease)
        for endpoint in self._tried if self._alone else self._tried[:-1]:  # it may have published before it failed
            await self._daemons.free(endpoint, self._asked.handover_id)


def _succeeded(task: asyncio.Task[Any]) -> bool:
    """Leaves no exception of the task unseen."""
    return task.done() and not task.cancelled() and task.exception() is None


@asynccontextmanager
async def leg(name: str, endpoint: Endpoint, timeout_s: float) -> AsyncIterator[None]:
    """Raises KvferryError for what goes wrong with an engine: `engine_unreachable`, `engine_timeout`; `full`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise Deadline(
            "engine_timeout", f"the {name} engine at {endpoint.url} took longer than {timeout_s:g} s",
            field=f"--{name}-timeout", value=timeout_s, remedy=f"try again, or allow more with --{name}-timeout",
        ) from error  # fmt: skip
    except httpx.PoolTimeout as error:
        what = "all connections that the proxy may have to engines are in use"
        raise Full("full", what, field="--max-connections", remedy="try again shortly, or allow more") from error
    except httpx.HTTPError as error:
        raise _unreachable(name, endpoint, error) from error


def _unreachable(name: str, endpoint: Endpoint, error: Exception) -> KvferryError:
    return Unavailable(
        "engine_unreachable", f"the {name} engine at {endpoint.url} failed: {str(error) or type(error).__name__}",
        field=name, value=endpoint.url, remedy="is the engine up? try again",
    )  # fmt: skip
