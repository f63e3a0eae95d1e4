"""Which engine prefills at a bootstrap address: decode asks it there, beside SGLang's scheduler."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from concurrent.futures import wait
from typing import Annotated

import httpx
from pydantic import BaseModel, Field

from kvferry.handoff import Remembered
from kvferry.schemas import SourceBody

log = logging.getLogger(__name__)
PATH = "/kvferry"
"""The HTTP path at which a prefill engine answers with a `Prefill`."""
ASK_S = 2.0
"""How long a prefill engine may take to say so."""
MOST_NBYTES = 64 << 10
"""The longest answer that is read: requests name the addresses, so that anybody may name one that never ends."""
GLANCE_S = 0.05
"""How long decode's scheduler waits for it, once in ASK_S. SGLang asks again a second later."""
ASKS = 64
"""Addresses that are asked at once. Requests name them, so that anybody may name one that is silent."""


class Prefill(BaseModel):
    """A server that prefills. sources: its engines, by DP rank. kv_cache_dtype: SGLang's name of its cache type.
    encoding: what that means there."""

    sources: Annotated[list[SourceBody], Field(min_length=1)]
    kv_cache_dtype: str
    encoding: str


class Sources:
    """The prefill engines that are known, by bootstrap address. SGLang's scheduler calls it; another thread sends the
    HTTP requests."""

    def __init__(self) -> None:
        self.known: Remembered[Prefill] = Remembered()
        self._lock = threading.Lock()
        """Guards changes of `known`."""
        self._asking: set[str] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="kvferry-bootstrap", daemon=True).start()
        none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # httpx's own reads all authorities; this is no https
        self._http = httpx.AsyncClient(trust_env=False, verify=none, headers={"accept-encoding": "identity"})
        self._glance_at = 0.0
        """When the scheduler may wait again."""

    def ensure(self, address: str) -> Prefill | None:
        """The server that prefills there, where it is known. If not it is asked, and known later."""
        if address not in self.known and address not in self._asking and len(self._asking) < ASKS:
            self._asking.add(address)
            asked = asyncio.run_coroutine_threadsafe(self._ask(address), self._loop)
            if (now := time.monotonic()) >= self._glance_at:
                self._glance_at = now + ASK_S
                wait([asked], GLANCE_S)
        return self.known.get(address)

    def forget(self, address: str) -> None:
        """Another engine may be there by now."""
        with self._lock:
            self.known.pop(address, None)

    async def _ask(self, address: str) -> None:
        """Within ASK_S, however slowly its name is found or its answer comes."""
        try:
            async with asyncio.timeout(ASK_S):
                async with self._http.stream("GET", f"http://{address}{PATH}") as response:
                    content = bytearray()
                    async for chunk in response.raise_for_status().aiter_raw():
                        content += chunk
                        if len(content) > MOST_NBYTES:
                            raise ValueError(f"its answer has more than {MOST_NBYTES} bytes")
            prefill = Prefill.model_validate_json(bytes(content))
            with self._lock:
                self.known[address] = prefill
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            log.warning("no prefill engine answers at bootstrap address %s: %s", address, why)
        finally:
            self._asking.discard(address)
