"""One request on its way through both legs, and what is freed when it fails.

Until decode's first byte has come, every failure has an HTTP status of its own. Whatever ends an exchange early
(a refusal of decode, a failed order, a client that left) ends in `clean_up`: both sides abort at once, so that
prefill's blocks are not held until the lease's ttl.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from kvferry.errors import KvferryError, PeerFailed
from kvferry.proxy.answer import Answer, Whole, passed_on
from kvferry.proxy.daemons import Daemons
from kvferry.proxy.legs import JsonObject, TransferParams, decode_body, prefill_body
from kvferry.proxy.options import Endpoint, Options, OrderedBy
from kvferry.proxy.upstream import leg, unreachable, whole
from kvferry.schemas import Ordered

PREFILL_GRACE_S = 2.0
"""A client that leaves during prefill: how long prefill's answer is still awaited for the lease's name in it."""
RETRIED = (502, 503, 504)
"""Prefill answers that another prefill engine may cure; all others go to the client unchanged."""
ORDER_GRACE_S = 2.0
"""An order under way is let through before it is aborted: the abort must not overtake it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client sent. `headers` go to both legs, with `handover_id` as X-Request-Id."""

    path: str
    body: JsonObject
    headers: Mapping[str, str]
    request_id: str
    """The client's: in its answer and in the log."""
    handover_id: str


@dataclass(slots=True, eq=False)
class Exchange:
    """`prefills`: the engines to try, in this order. `decode`: the one that answers."""

    asked: Asked
    prefills: tuple[Endpoint, ...]
    decode: Endpoint
    options: Options
    http: httpx.AsyncClient
    daemons: Daemons
    error: KvferryError | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    tried: list[Endpoint] = field(default_factory=list)
    params: TransferParams | None = None
    settled: bool = False
    """Nothing is left to free: decode answered to the end, or prefill published nothing."""
    _began: float = field(default_factory=time.monotonic)
    _prefilling: asyncio.Task[Whole | None] | None = None
    _ordering: asyncio.Task[Ordered] | None = None
    _decode_asked: bool = False

    async def serve(self, answer: Answer) -> None:
        """Answer the client. Raises nothing of what can go wrong behind the proxy."""
        try:
            # Shielded: clean_up may still want its answer when the client has left.
            self._prefilling = asyncio.create_task(self._prefill())
            refused = await asyncio.shield(self._prefilling)
            self._mark("prefill")
            if refused:
                self.settled = True
                await answer.whole(refused)
            else:
                await self._decode(answer)
        except KvferryError as error:
            self.error = error
            await answer.fail(error)

    async def _prefill(self) -> Whole | None:
        """Ask prefill engines in order until one answers with anything but 502, 503 or 504; the last answer counts.

        Keeps what was published in `params`. Returns a refusal for the client. Raises KvferryError: `malformed_answer`,
        `malformed_kv_transfer_params`, and what `leg` raises.
        """
        endpoints = self.prefills[: self.options.prefill_attempts]
        async with leg("prefill", endpoints[0], self.options.prefill_timeout_s):
            for endpoint in endpoints:
                last = endpoint is endpoints[-1]
                self.tried.append(endpoint)
                try:
                    response = await self.http.post(
                        endpoint.url + self.asked.path, json=prefill_body(self.asked.body), headers=self.asked.headers
                    )
                except httpx.HTTPError as error:
                    if last:
                        raise unreachable("prefill", endpoint, error) from error
                    continue
                if last or response.status_code not in RETRIED:
                    break
            if response.status_code >= 400:
                return await whole(response)
            self.params = TransferParams.of(response)
            return None

    async def _decode(self, answer: Answer) -> None:
        ordered = self.params is not None and self.options.order is OrderedBy.ROUTER
        body = decode_body(self.asked.body, self.params, ordered=ordered)
        if ordered:
            assert self.params is not None
            self._ordering = asyncio.create_task(
                self.daemons.order(
                    self.decode,
                    self.params.order(),
                    timeout_s=self.options.order_timeout_s,
                    traceparent=self.asked.headers.get("traceparent", ""),
                )
            )
        relaying = asyncio.create_task(self._relay(body, answer))
        try:
            await self._order_or_first_byte(relaying, answer)
            answered = await relaying
        finally:
            relaying.cancel()
            await asyncio.wait({relaying})
        # An order that was not taken by the end of a good answer was not needed, and must not outlive it.
        self.settled = self.params is None or (answered and (self._ordering is None or self._ordered))

    async def _order_or_first_byte(self, relaying: asyncio.Task[bool], answer: Answer) -> None:
        """Returns when the order was taken or decode has answered; raises the order's error before that."""
        if self._ordering is None:
            return
        await asyncio.wait({self._ordering, relaying}, return_when=asyncio.FIRST_COMPLETED)
        if self._ordering.done() and not answer.status and not relaying.done():
            self._ordering.result()
            self._mark("order")

    async def _relay(self, body: JsonObject, answer: Answer) -> bool:
        """Pass decode's answer on, byte for byte. False when it is a refusal."""
        self._decode_asked = True
        async with (
            leg("decode", self.decode, self.options.decode_timeout_s),
            self.http.stream(
                "POST", self.decode.url + self.asked.path, json=body, headers=self.asked.headers
            ) as response,
        ):
            if response.status_code >= 400:
                self.error = PeerFailed("decode_refused", f"decode answered {response.status_code}")
                await answer.whole(await whole(response))
                return False
            headers = (*passed_on(response.headers.multi_items()), ("x-kvferry-request-id", self.lease_id))
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
        self.timings_ms[phase] = round((time.monotonic() - self._began) * 1e3, 1)

    @property
    def _ordered(self) -> bool:
        """Whether the order has been taken."""
        done = self._ordering
        return done is not None and done.done() and not done.cancelled() and done.exception() is None

    @property
    def lease_id(self) -> str:
        """What prefill named the lease; until it has, the id that the request went in with is the best guess."""
        return (self.params.request_id if self.params else "") or self.asked.handover_id

    @property
    def clean(self) -> bool:
        """Whether `clean_up` would have nothing to do."""
        return self.settled and len(self.tried) == 1

    async def clean_up(self) -> None:
        """Free what the request may hold on either side. Bounded; failures are logged."""
        if self.params is None:
            await _let_end(self._prefilling, PREFILL_GRACE_S)
        await _let_end(self._ordering, ORDER_GRACE_S)
        if not self.settled:
            if self._decode_asked:
                await self.daemons.free(self.decode, self.lease_id)
            for endpoint in self.tried[-1:]:
                await self.daemons.free(endpoint, self.lease_id)
        for endpoint in self.tried[:-1]:
            await self.daemons.free(endpoint, self.asked.handover_id)


async def _let_end(task: asyncio.Task[Whole | None] | asyncio.Task[Ordered] | None, grace_s: float) -> None:
    """Wait for the task, cancel it after `grace_s`, and leave no exception of it unseen."""
    if task is None:
        return
    await asyncio.wait({task}, timeout=grace_s)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
    if task.done() and not task.cancelled():
        task.exception()
