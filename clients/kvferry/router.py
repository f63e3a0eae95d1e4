"""How a router drives a daemon: the REST API, typed and asynchronous.

Every operation of the daemon is idempotent by its id, so a call that was lost on a closing connection is sent
once more. Every call has a deadline; nothing here waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict

from kvferry.manifest import Manifest
from kvferry.problem import DaemonError, malformed, problem, refused
from kvferry.schemas import (
    AbortResult,
    DrainRequest,
    DrainStatus,
    EngineList,
    EngineRecord,
    ExplainRequest,
    ExplainTables,
    Health,
    Info,
    LeaseList,
    LeaseRecord,
    OrderBody,
    Ordered,
    PeerList,
    PeerRecord,
    PeerRequest,
    Readiness,
    TransferList,
    TransferRecord,
    TransferState,
)

__all__ = ["DaemonError", "Explanation", "RouterClient"]

T = TypeVar("T", bound=BaseModel)
POLL_S = 30.0
"""One long poll. `RouterClient.wait` strings several together: proxies and load balancers cut longer silences."""


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
    """One daemon's REST service. Raises DaemonError (a KvferryError) from every method but `healthy`.

    url: for example "http://127.0.0.1:7410". token: sent as a bearer token. timeout_s: for a whole call; long polls
    add their own wait. http: share one connection pool among several clients; its owner closes it. tls: for https,
    a context with the client's certificate where the daemon asks for one.

    >>> async with RouterClient("http://127.0.0.1:7410") as daemon:
    ...     source = SourceBody(engine_id="prefill", address="10.0.0.7:7411")
    ...     ordered = await daemon.order(OrderBody(request_id="r1", source=source))
    ...     record = await daemon.wait(ordered.transfer_id, timeout_s=30)
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 10.0,
        http: httpx.AsyncClient | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._owned = http is None
        # trust_env: a proxy for the outside world, set in the environment, has no business between router and daemon.
        self._http = http or httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s), trust_env=False, verify=True if tls is None else tls
        )

    async def __aenter__(self) -> RouterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._owned:
            await self._http.aclose()

    # transfers

    async def order(self, body: OrderBody, *, traceparent: str = "") -> Ordered:
        """Order a transfer. The same order again answers with the same transfer.

        Raises `order_conflict` for another body under the same request_id, `full` (see `retry_after_s`),
        `address_not_allowed`, `draining`.
        """
        headers = {"traceparent": traceparent} if traceparent else {}
        return await self._call("POST", "/v1/transfers", Ordered, body=body, headers=headers)

    async def transfer(self, transfer_id: str, *, wait_s: float = 0.0) -> TransferRecord:
        """The record as it is now, or at its end if that comes within `wait_s`. Raises `unknown_transfer`."""
        path = f"/v1/transfers/{_quoted(transfer_id)}"
        return await self._call("GET", path, TransferRecord, query=_wait(wait_s), wait_s=wait_s)

    async def wait(self, transfer_id: str, *, timeout_s: float = 60.0) -> TransferRecord:
        """Long-poll until the transfer ended or `timeout_s` passed: look at `record.state.ended`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            record = await self.transfer(transfer_id, wait_s=min(left, POLL_S))
            if record.state.ended or left == 0:
                return record

    async def transfers(
        self, request_id: str | None = None, state: TransferState | None = None, *, wait_s: float = 0.0
    ) -> list[TransferRecord]:
        """All that match. With `request_id` and `wait_s`: waits for that request's transfer to come and end."""
        query = _wait(wait_s)
        if request_id is not None:
            query["request_id"] = request_id
        if state is not None:
            query["state"] = state.value
        return (await self._call("GET", "/v1/transfers", TransferList, query=query, wait_s=wait_s)).transfers

    async def abort_transfer(self, transfer_id: str) -> TransferRecord:
        return await self._call("DELETE", f"/v1/transfers/{_quoted(transfer_id)}", TransferRecord)

    async def abort_request(self, request_id: str) -> AbortResult:
        """End whatever this daemon holds for the request: its transfer and its lease."""
        return await self._call("POST", f"/v1/requests/{_quoted(request_id)}/abort", AbortResult)

    # leases, peers, engines

    async def leases(self) -> list[LeaseRecord]:
        return (await self._call("GET", "/v1/leases", LeaseList)).leases

    async def revoke_lease(self, request_id: str) -> LeaseRecord:
        """Raises `unknown_lease`."""
        return await self._call("DELETE", f"/v1/leases/{_quoted(request_id)}", LeaseRecord)

    async def peers(self) -> list[PeerRecord]:
        return (await self._call("GET", "/v1/peers", PeerList)).peers

    async def prewarm(self, body: PeerRequest, *, timeout_s: float = 30.0) -> list[PeerRecord]:
        """Shake hands with every rank of a source engine now: the first contact takes seconds."""
        return (await self._call("POST", "/v1/peers", PeerList, body=body, wait_s=timeout_s)).peers

    async def forget_peer(self, engine_id: str) -> list[PeerRecord]:
        """Drop what is held of that engine's ranks. Returns the peers that were forgotten."""
        return (await self._call("DELETE", "/v1/peers", PeerList, query={"engine_id": engine_id})).peers

    async def engines(self) -> list[EngineRecord]:
        return (await self._call("GET", "/v1/engines", EngineList)).engines

    async def explain(
        self, sources: Sequence[Manifest], destination: Manifest, tables: ExplainTables | None = None
    ) -> Explanation:
        """What a transfer between these would do. A pair that is refused raises with `refusals`."""
        body = ExplainRequest(
            sources=[source.model_dump(mode="json") for source in sources],
            destination=destination.model_dump(mode="json"),
            tables=tables,
        )
        return await self._call("POST", "/v1/explain", Explanation, body=body)

    # the daemon itself

    async def drain(self, wait_s: float = 0.0) -> DrainStatus:
        """Take no more orders and leases. Holds the answer until nothing is left, at most `wait_s`."""
        return await self._call("POST", "/v1/drain", DrainStatus, body=DrainRequest(wait_s=wait_s), wait_s=wait_s)

    async def drain_status(self) -> DrainStatus:
        return await self._call("GET", "/v1/drain", DrainStatus)

    async def info(self) -> Info:
        return await self._call("GET", "/v1/info", Info)

    async def ready(self) -> Readiness:
        """A daemon that is up but not ready answers with its reasons; one that is down raises."""
        return await self._call("GET", "/readyz", Readiness, accept=503)

    async def healthy(self) -> bool:
        """Whether the process answers. Never raises."""
        try:
            return (await self._call("GET", "/healthz", Health)).status == "ok"
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
        request = self._http.build_request(
            method,
            self.url + path,
            params=query,
            headers={**self._headers, **(headers or {})},
            json=None if body is None else body.model_dump(mode="json", exclude_none=True),
            timeout=httpx.Timeout(timeout_s, connect=self.timeout_s, pool=self.timeout_s),
        )
        response = await self._send(request, timeout_s)
        if not response.is_success and response.status_code != accept:
            raise problem(response)
        try:
            parsed = json.loads(response.content)
            if isinstance(parsed, dict) and parsed.get("refused"):
                raise refused(response.status_code, parsed["refused"])
            return answer.model_validate(parsed)
        except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
            if response.status_code == accept != 200:
                raise problem(response) from None
            raise malformed(response, error) from None

    async def _send(self, request: httpx.Request, timeout_s: float) -> httpx.Response:
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._http.send(request)
                except httpx.RemoteProtocolError:
                    # The daemon closed an idle connection while the request was on its way.
                    return await self._http.send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._unreachable(error) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise DaemonError(
                "daemon_timeout",
                f"the daemon did not answer {request.method} {request.url.path} within {timeout_s:g} s",
                field="url",
                value=self.url,
                remedy="look at its log, or give the call a longer timeout_s",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> DaemonError:
        return DaemonError(
            "daemon_unreachable",
            f"no daemon answers at {self.url}: {str(error) or type(error).__name__}",
            field="url",
            value=self.url,
            remedy="is `kvferry serve` running there, and is this its REST address (http://host:7410 by default)?",
        )


def _quoted(part: str) -> str:
    return quote(part, safe="")


def _wait(wait_s: float) -> dict[str, str]:
    return {"wait": f"{wait_s:.3f}"} if wait_s > 0 else {}
