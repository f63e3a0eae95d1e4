"""The engines behind the proxy: which is next, how they fail, and their complete answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from kvferry.errors import Deadline, Forbidden, KvferryError, Unavailable
from kvferry.proxy.answer import Whole, passed_on
from kvferry.proxy.options import Endpoint


class Ring:
    """Endpoints in turn."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        assert endpoints, "a ring has at least one endpoint"
        self.endpoints = tuple(endpoints)
        self._next = itertools.count()

    def turn(self) -> tuple[Endpoint, ...]:
        """All of them, beginning with the next one."""
        first = next(self._next) % len(self.endpoints)
        return self.endpoints[first:] + self.endpoints[:first]

    def among(self, host_ports: str) -> tuple[Endpoint, ...]:
        """Those that an x-prefiller-host-port header names. Raises KvferryError `prefiller_not_allowed`."""
        wanted = [name.strip().lower() for name in host_ports.split(",") if name.strip()]
        known = {endpoint.host_port for endpoint in self.endpoints}
        for name in wanted:
            if name not in known:
                raise Forbidden(
                    "prefiller_not_allowed", f"{name[:100]} is not a prefill engine of this proxy",
                    field="x-prefiller-host-port", value=name, remedy="name engines given with --prefill, as host:port",
                )  # fmt: skip
        return tuple(endpoint for endpoint in self.turn() if not wanted or endpoint.host_port in wanted)


async def whole(response: httpx.Response) -> Whole:
    """The rest of a response; read decoded, so its content-encoding goes."""
    content = await response.aread()
    headers = passed_on(response.headers.multi_items(), dropped=["content-encoding"])
    return Whole(response.status_code, headers, content)


@asynccontextmanager
async def leg(name: str, endpoint: Endpoint, timeout_s: float) -> AsyncIterator[None]:
    """Raises KvferryError for what goes wrong with an engine: `engine_unreachable`, `engine_timeout`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise Deadline(
            "engine_timeout", f"the {name} engine took longer than {timeout_s:g} s", field=f"--{name}-timeout",
            value=timeout_s, remedy=f"try again, or allow more with --{name}-timeout",
        ) from error  # fmt: skip
    except httpx.HTTPError as error:
        raise unreachable(name, endpoint, error) from error


def unreachable(name: str, endpoint: Endpoint, error: Exception) -> KvferryError:
    return Unavailable(
        "engine_unreachable", f"the {name} engine at {endpoint.url} failed: {str(error) or type(error).__name__}",
        field=name, value=endpoint.url, remedy="is the engine up? try again",
    )  # fmt: skip
