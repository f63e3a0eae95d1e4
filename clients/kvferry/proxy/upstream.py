"""The engines behind the proxy: round robin, the prefill leg with its bounded retry, opening the decode leg."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from kvferry.errors import KvferryError
from kvferry.proxy.answer import Whole, passed_on
from kvferry.proxy.legs import JsonObject, TransferParams
from kvferry.proxy.options import Endpoint

RETRIED = (502, 503, 504)
"""Prefill answers that another prefill engine may cure; all others go to the client unchanged."""


class Ring:
    """Endpoints in turn."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        assert endpoints, "a ring has at least one endpoint"
        self.endpoints = tuple(endpoints)
        self._next = itertools.count()

    def turn(self) -> tuple[Endpoint, ...]:
        """All of them, beginning with the one whose turn it is."""
        first = next(self._next) % len(self.endpoints)
        return self.endpoints[first:] + self.endpoints[:first]

    def among(self, host_ports: str) -> tuple[Endpoint, ...]:
        """Those that an x-prefiller-host-port header names. Raises KvferryError `prefiller_not_allowed`."""
        wanted = [name.strip().lower() for name in host_ports.split(",") if name.strip()]
        known = {endpoint.host_port for endpoint in self.endpoints}
        for name in wanted:
            if name not in known:
                raise KvferryError(
                    "prefiller_not_allowed",
                    f"{name[:100]} is not a prefill engine of this proxy",
                    field="x-prefiller-host-port",
                    value=name,
                    remedy="name engines given with --prefill, as host:port",
                )
        return tuple(endpoint for endpoint in self.turn() if not wanted or endpoint.host_port in wanted)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill engine answered. `params` is None when it refused or published nothing."""

    endpoint: Endpoint
    answer: Whole
    params: TransferParams | None

    @property
    def refused(self) -> bool:
        return self.answer.status >= 400


async def prefill(
    http: httpx.AsyncClient,
    path: str,
    body: JsonObject,
    headers: Mapping[str, str],
    endpoints: Sequence[Endpoint],
    *,
    timeout_s: float,
    trying: Callable[[Endpoint], None],
) -> Prefilled:
    """Ask `endpoints` in order until one answers with anything but 502, 503 or 504; the last answer counts.

    trying: told each engine before it is asked. timeout_s: for all attempts together. Raises KvferryError
    `engine_unreachable`, `engine_timeout`, `malformed_answer` or `malformed_kv_transfer_params`.
    """
    async with _deadline("prefill", timeout_s):
        for attempt, endpoint in enumerate(endpoints, start=1):
            left = len(endpoints) - attempt
            trying(endpoint)
            try:
                response = await http.post(endpoint.url + path, json=body, headers=dict(headers))
            except httpx.HTTPError as error:
                if left:
                    continue
                raise _unreachable("prefill", endpoint, error) from error
            if response.status_code in RETRIED and left:
                continue
            answer = await whole(response)
            return Prefilled(endpoint, answer, None if answer.status >= 400 else _params(endpoint, response))
    raise AssertionError("at least one endpoint is asked")


def _params(endpoint: Endpoint, response: httpx.Response) -> TransferParams | None:
    try:
        parsed = response.json()
    except (ValueError, RecursionError) as error:
        raise KvferryError(
            "malformed_answer",
            f"the prefill engine answered {response.status_code} with something that is not JSON: {error}",
            field="prefill",
            value=endpoint.url,
            remedy="is this an OpenAI-compatible engine?",
        ) from None
    return TransferParams.of(parsed)


@asynccontextmanager
async def opened(
    http: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: JsonObject
) -> AsyncIterator[httpx.Response]:
    """A response of which only the headers have been read. Leaving before its end closes the connection."""
    request = http.build_request(method, url, json=body, headers=dict(headers))
    response = await http.send(request, stream=True)
    try:
        yield response
    finally:
        await response.aclose()


async def whole(response: httpx.Response) -> Whole:
    """The rest of a response; read decoded, so its content-encoding goes."""
    content = await response.aread()
    headers = passed_on(response.headers.multi_items(), dropped=["content-encoding"])
    return Whole(response.status_code, headers, content)


@asynccontextmanager
async def leg(name: str, endpoint: Endpoint, timeout_s: float) -> AsyncIterator[None]:
    """Turns what can go wrong with an engine into KvferryError `engine_unreachable` or `engine_timeout`."""
    async with _deadline(name, timeout_s):
        try:
            yield
        except httpx.HTTPError as error:
            raise _unreachable(name, endpoint, error) from error


@asynccontextmanager
async def _deadline(name: str, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise KvferryError(
            "engine_timeout",
            f"the {name} engine took longer than {timeout_s:g} s",
            field=f"--{name}-timeout",
            value=timeout_s,
            remedy=f"try again, or allow more with --{name}-timeout",
        ) from error


def _unreachable(name: str, endpoint: Endpoint, error: Exception) -> KvferryError:
    return KvferryError(
        "engine_unreachable",
        f"the {name} engine at {endpoint.url} failed: {str(error) or type(error).__name__}",
        field=name,
        value=endpoint.url,
        remedy="is the engine up? try again",
    )
