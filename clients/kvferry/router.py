"""How a router drives a daemon: the REST API, typed and asynchronous.

Every operation of the daemon is idempotent by its id, so a call that was lost on a closing connection is sent
once more. Every call has a deadline; nothing here waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict

from kvferry import __version__, schemas
from kvferry.errors import Details, Kind, KvferryError, Refusal
from kvferry.manifest import Manifest

__all__ = ["DaemonError", "Explanation", "RouterClient"]

T = TypeVar("T", bound=BaseModel)
_quoted = partial(quote, safe="")
LONGEST_CALL_S = 3600.0
"""A daemon holds the answer to a call no longer."""
KEPT_S = 25.0
"""How long an idle connection is kept: a daemon closes it after 30 s, and asks may be that far apart."""
CONNECTIONS = 1024
"""As many as a daemon takes at most (a quarter of its descriptors): beyond that it ends calls, so they wait here."""
POLL_S = 30.0
"""Seconds of one long poll. `RouterClient.wait` strings several together: proxies and load balancers cut longer
silences."""


class DaemonError(KvferryError):
    """A daemon's error, or the lack of an answer.

    status: the HTTP status, 0 when no answer came. retry_after_s: set when the daemon is full (429) or draining.
    Codes of our own: `malformed_url`, `client_closed`, `client_full`, `daemon_unreachable`, `daemon_timeout`,
    `malformed_answer`; all others are the daemon's.
    """

    def __init__(
        self, code: str, message: str, *, status: int = 0, retry_after_s: float | None = None, **more: Unpack[Details]
    ) -> None:
        super().__init__(code, message, **more)
        self.kind = Kind.of_http(status)
        self.status = status
        self.retry_after_s = retry_after_s


class Explanation(BaseModel):
    """A plan's summary, or every run where tables were given. Answers of newer daemons may hold more fields."""

    model_config = ConfigDict(extra="allow")

    sources: list[object] | None = None
    run_bytes: object = None
    descriptors_per_token: float | None = None
    path: str | None = None
    runs: list[tuple[int, int, int, int, int, int]] | None = None
    """[source_rank, source_region, source_offset, destination_region, destination_offset, nbytes], in bytes."""


class RouterClient:
    """A daemon's REST service. Raises DaemonError (a KvferryError) from every method but `healthy`.

    url: for example "http://127.0.0.1:7410". token: sent as a bearer token. timeout_s: for a whole call, half of it to
    get one of CONNECTIONS; long polls add their own wait. tls: for https, a context with the client's certificate where
    the daemon asks for one; clients may share it. name: what the daemon's log calls the caller.

    >>> async with RouterClient("http://127.0.0.1:7410") as daemon:
    ...     source = SourceBody(engine_id="prefill", address="10.0.0.7:7411")
    ...     ordered = await daemon.order(OrderBody(request_id="r1", source=source))
    ...     record = await daemon.wait(ordered.transfer_id, timeout_s=30)
    """

    def __init__(
        self, url: str, *, token: str = "", timeout_s: float = 10.0, tls: ssl.SSLContext | None = None, name: str = ""
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"user-agent": name or f"kvferry/{__version__}"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        # trust_env: a proxy for the outside world, set in the environment, has no business between router and daemon.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s), trust_env=False, verify=True if tls is None else tls,
            limits=httpx.Limits(
                max_connections=CONNECTIONS, max_keepalive_connections=20, keepalive_expiry=KEPT_S
            ),
        )  # fmt: skip

    async def __aenter__(self) -> RouterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # transfers

    async def order(self, body: schemas.OrderBody, *, traceparent: str = "", x_request_id: str = "") -> schemas.Ordered:
        """Order a transfer, at any rank of the engine that reads. It gets an order_id of its own where it has none; the
        same order again, under one order_id, answers with the same transfer.

        traceparent (W3C) and x_request_id: on every line of the transfer, in the logs of all daemons of both sides. A
        text that is no ASCII is left out.

        Raises `order_conflict` for another body under the same order_id, or under the same request_id while that is
        under way, `full` (see `retry_after_s`),
        `address_not_allowed`, `draining`.
        """
        if body.order_id is None:
            body = body.model_copy(update={"order_id": uuid.uuid4().hex})
        given = {"traceparent": traceparent, "x-request-id": x_request_id}
        headers = {name: value for name, value in given.items() if value and value.isascii()}
        return await self._call("POST", "/v1/transfers", schemas.Ordered, body=body, headers=headers)

    async def transfer(self, transfer_id: str, *, wait_s: float = 0.0) -> schemas.TransferRecord:
        """The record as it is now, or at its end if that comes within `wait_s`. Raises `unknown_transfer`."""
        path = f"/v1/transfers/{_quoted(transfer_id)}"
        return await self._call("GET", path, schemas.TransferRecord, query=_wait(wait_s), wait_s=wait_s)

    async def source_half(self, transfer_id: str) -> schemas.SourceHalf:
        """The lease that the transfer reads, as the source's daemons know it, which are asked now. Raises
        `unknown_transfer`."""
        return await self._call("GET", f"/v1/transfers/{_quoted(transfer_id)}/source", schemas.SourceHalf)

    async def wait(self, transfer_id: str, *, timeout_s: float = 60.0) -> schemas.TransferRecord:
        """Long-poll until the transfer ended or `timeout_s` passed: look at `record.state.ended`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            record = await self.transfer(transfer_id, wait_s=min(left, POLL_S))
            if record.state.ended or left == 0:
                return record

    async def transfers(
        self,
        request_id: str | None = None,
        state: schemas.TransferState | None = None,
        *,
        limit: int = 100,
        wait_s: float = 0.0,
    ) -> list[schemas.TransferRecord]:
        """The newest `limit` that match, the oldest of them first. With `request_id` and `wait_s`: waits for that
        request's transfer to come and end."""
        wanted = {"request_id": request_id, "state": state}
        query = _wait(wait_s) | {name: value for name, value in wanted.items() if value is not None}
        query |= {"limit": str(limit)}
        return (await self._call("GET", "/v1/transfers", schemas.TransferList, query=query, wait_s=wait_s)).transfers

    async def changes(self, cursor: str = "", *, limit: int = 100) -> schemas.TransferList:
        """The transfers that may have changed since an answer had this cursor: cheap to ask for every second."""
        query = {"since": cursor, "limit": str(limit)}
        return await self._call("GET", "/v1/transfers", schemas.TransferList, query=query)

    async def abort_transfer(self, transfer_id: str) -> schemas.TransferRecord:
        return await self._call("DELETE", f"/v1/transfers/{_quoted(transfer_id)}", schemas.TransferRecord)

    async def abort_request(self, request_id: str) -> schemas.AbortResult:
        """End whatever this daemon holds for the request: its transfer and its lease."""
        return await self._call("POST", f"/v1/requests/{_quoted(request_id)}/abort", schemas.AbortResult)

    # leases, peers, engines

    async def leases(self, *, limit: int = 100, ended: int = 0) -> list[schemas.LeaseRecord]:
        """The newest `limit` that are held; before them the last `ended` that are not any more."""
        query = {"limit": str(limit), "ended": str(ended)}
        return (await self._call("GET", "/v1/leases", schemas.LeaseList, query=query)).leases

    async def revoke_lease(self, request_id: str) -> schemas.LeaseRecord:
        """Raises `unknown_lease`."""
        return await self._call("DELETE", f"/v1/leases/{_quoted(request_id)}", schemas.LeaseRecord)

    async def peers(self) -> list[schemas.PeerRecord]:
        return (await self.neighbours()).peers

    async def neighbours(self) -> schemas.PeerList:
        """The peers that are read from, those that were lost, and those that read here."""
        return await self._call("GET", "/v1/peers", schemas.PeerList)

    async def prewarm(self, body: schemas.PeerRequest, *, timeout_s: float = 30.0) -> list[schemas.PeerRecord]:
        """All ranks of the engine here shake hands with every rank of a source engine now: the first contact takes
        seconds. Raises the error of a rank that could not, by its number."""
        return (await self._call("POST", "/v1/peers", schemas.PeerList, body=body, wait_s=timeout_s)).peers

    async def forget_peer(self, engine_id: str) -> list[schemas.PeerRecord]:
        """Drop what is held of that engine's ranks. Returns the peers that were forgotten."""
        return (await self._call("DELETE", "/v1/peers", schemas.PeerList, query={"engine_id": engine_id})).peers

    async def engines(self, *, manifests: bool = True) -> list[schemas.EngineRecord]:
        """manifests: false leaves them out, which may be large."""
        query = {"manifests": str(manifests).lower()}
        return (await self._call("GET", "/v1/engines", schemas.EngineList, query=query)).engines

    async def explain(
        self, sources: Sequence[Manifest], destination: Manifest, tables: schemas.ExplainTables | None = None
    ) -> Explanation:
        """The effect of a transfer between these. A pair that is refused raises with `refusals`."""
        body = schemas.ExplainRequest(
            sources=[source.model_dump(mode="json") for source in sources],
            destination=destination.model_dump(mode="json"),
            tables=tables,
        )
        return await self._call("POST", "/v1/explain", Explanation, body=body)

    async def plan(self, engine_id: str, destination: str | None = None) -> schemas.PlanRecord:
        """The plan between this peer engine and the daemon's own. Raises `unknown_peer`."""
        query = {"engine_id": engine_id} | ({"destination": destination} if destination else {})
        return await self._call("GET", "/v1/plan", schemas.PlanRecord, query=query)

    # the daemon itself

    async def drain(self, wait_s: float = 0.0) -> schemas.DrainStatus:
        """Take no more orders and leases. Holds the answer until nothing is left, at most `wait_s`, or until the drain
        is cancelled. A daemon holds a call for an hour at most; then it is asked again."""
        while True:
            held_s = min(wait_s, LONGEST_CALL_S)
            wait_s -= held_s
            body = schemas.DrainRequest(wait_s=held_s)
            left = await self._call("POST", "/v1/drain", schemas.DrainStatus, body=body, wait_s=held_s)
            if left.drained or not left.draining or wait_s <= 0:
                return left

    async def cancel_drain(self) -> schemas.DrainStatus:
        """Take orders again. Raises `stopping` once the daemon was told to stop."""
        return await self._call("DELETE", "/v1/drain", schemas.DrainStatus)

    async def drain_status(self) -> schemas.DrainStatus:
        return await self._call("GET", "/v1/drain", schemas.DrainStatus)

    async def totals(self) -> schemas.Totals:
        return await self._call("GET", "/v1/totals", schemas.Totals)

    async def history(
        self, span_s: int = 3600, step_s: int = 60, *, since: float = 0.0, peers: bool = False
    ) -> schemas.History:
        """Figures of the last `span_s` (86,400 at most), each point of `step_s` (5, or a multiple of 60), and marks of
        starts, deaths, upgrades and drains. since: nothing that has ended before. peers: figures of each, too."""
        query = {"span_s": f"{span_s}", "step_s": f"{step_s}", "since": f"{since}", "peers": f"{peers}".lower()}
        return await self._call("GET", "/v1/history", schemas.History, query=query)

    async def info(self) -> schemas.Info:
        return await self._call("GET", "/v1/info", schemas.Info)

    async def ready(self) -> schemas.Readiness:
        """A daemon that is up but not ready answers with its reasons; one that is down raises."""
        return await self._call("GET", "/readyz", schemas.Readiness, accept=503)

    async def healthy(self) -> bool:
        """Whether the process answers. Never raises."""
        try:
            return (await self._call("GET", "/healthz", schemas.Health)).status == "ok"
        except DaemonError:
            return False

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: BaseModel | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        accept: int = 200,
    ) -> T:
        timeout_s = self.timeout_s + wait_s
        try:
            url = httpx.URL(self.url + path)
        except (httpx.InvalidURL, UnicodeError) as error:
            message = f"this is no address of a daemon: {error}"
            remedy = "give its REST address, for example http://127.0.0.1:7410"
            raise DaemonError("malformed_url", message, field="url", value=self.url, remedy=remedy) from None
        request = self._http.build_request(
            method,
            url,
            params=query,
            headers={**self._headers, **(headers or {})},
            json=None if body is None else body.model_dump(mode="json", exclude_none=True),
            timeout=httpx.Timeout(timeout_s, connect=self.timeout_s, pool=self.timeout_s / 2),
        )
        response = await self._send(request, timeout_s)
        if not response.is_success and response.status_code != accept:
            raise _problem(response)
        try:
            return answer.model_validate(json.loads(response.content))
        except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
            raise (_malformed(response, error) if response.is_success else _problem(response)) from None

    async def _send(self, request: httpx.Request, timeout_s: float) -> httpx.Response:
        if self._http.is_closed:
            why = f"the client of the daemon at {self.url} is closed"
            raise DaemonError("client_closed", why, remedy="make another one")
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._http.send(request)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    # The daemon closed an idle connection while the request was on its way: an end, or a reset.
                    return await self._http.send(request)
        except httpx.PoolTimeout:
            why = f"all {CONNECTIONS} connections of this client to the daemon at {self.url} wait for answers"
            raise DaemonError("client_full", why, remedy="have fewer calls at once, or several clients") from None
        except (httpx.HTTPError, TimeoutError) as error:
            late = isinstance(error, httpx.TimeoutException | TimeoutError)
            if late and not isinstance(error, httpx.ConnectTimeout):
                code, remedy = "daemon_timeout", "look at its log, or give the call a longer timeout_s"
                asked = f"{request.method} {request.url.path}"
                message = f"the daemon at {self.url} did not answer {asked} within {timeout_s:g} s"
            elif isinstance(error, httpx.RemoteProtocolError) and str(error).startswith("illegal"):
                code, message = "daemon_unreachable", f"what listens at {self.url} is no daemon's REST service"
                remedy = "is this the peer port? The REST address is http://host:7410 by default"
            else:
                code, message = (
                    "daemon_unreachable",
                    f"no daemon answers at {self.url}: {str(error) or type(error).__name__}",
                )
                remedy = "is `kvferry serve` running there, and is this its REST address (http://host:7410 by default)?"
            raise DaemonError(code, message, field="url", value=self.url, remedy=remedy) from error


def _problem(response: httpx.Response) -> DaemonError:
    """The error that a response of 400 and above stands for."""
    try:
        body = schemas.Problem.model_validate(json.loads(response.content))
    except (ValueError, RecursionError) as error:
        return _malformed(response, error)
    return DaemonError(
        body.code,
        body.detail or body.title,
        status=response.status_code,
        retry_after_s=_retry_after(response),
        field=body.field,
        value=body.value,
        remedy=body.remedy,
        refusals=tuple(Refusal(**refusal.model_dump()) for refusal in body.refusals),
    )


def _malformed(response: httpx.Response, error: Exception) -> DaemonError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DaemonError(
        "malformed_answer",
        f"{response.request.method} {response.request.url} answered {response.status_code} with something that is "
        f"not kvferry's: {reason}",
        status=response.status_code,
        field="body",
        value=response.content[:120].decode(errors="replace"),
        remedy="is this the daemon's REST address, of a daemon that speaks /v1?",
    )


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _wait(wait_s: float) -> dict[str, str]:
    return {"wait": f"{wait_s:.3f}"} if wait_s > 0 else {}
