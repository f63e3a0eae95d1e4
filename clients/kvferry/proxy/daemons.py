"""The daemons behind the proxy: placing an order, and freeing both sides of a request that came to nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable

import httpx

from kvferry.errors import Deadline, KvferryError
from kvferry.proxy.options import Endpoint
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, Ordered

log = logging.getLogger("kvferry.proxy")
ABORT_TIMEOUT_S = 5.0


class Daemons:
    """REST clients of all daemons, over one connection pool, and the aborts that are under way."""

    def __init__(self, http: httpx.AsyncClient, endpoints: Iterable[Endpoint], *, token: str = "") -> None:
        urls = {url for endpoint in endpoints for url in endpoint.daemons}
        self._clients = {url: RouterClient(url, token=token, timeout_s=ABORT_TIMEOUT_S, http=http) for url in urls}
        self._aborts: set[asyncio.Task[None]] = set()

    async def order(self, decode: Endpoint, body: OrderBody, *, timeout_s: float, traceparent: str = "") -> Ordered:
        """Order at rank 0's daemon. A full daemon is asked again after its Retry-After, within `timeout_s`.

        Raises KvferryError: the daemon's own, `daemon_unreachable` or `daemon_timeout`.
        """
        client = self._clients[decode.daemons[0]]
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await client.order(body, traceparent=traceparent)
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
        await asyncio.gather(*(self._abort(self._clients[url], request_id) for url in endpoint.daemons))

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
        task = asyncio.create_task(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Let the aborts under way end; each is bounded."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=3 * ABORT_TIMEOUT_S)
