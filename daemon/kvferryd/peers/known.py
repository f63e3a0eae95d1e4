"""The peers that the settings name: their names are looked up again and again, and every engine of ours is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kvferry.threads import made
from kvferryd.aio import Tasks
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers import allow
from kvferryd.peers.peers import Peers

log = logs.get(__name__)
LOOK_S = 2.0
"""Names are looked up again, and what is lost is noticed, so often."""
SOON_S = 0.5
"""A lookup that takes longer keeps no other waiting: its answer is for the next look."""
LOOKUPS, LOOKUP_S = 8, 600.0
"""At once, and the longest: threads of their own, since one that hangs cannot be ended, and neither other work nor the
end of the process is to wait for it."""
MOST = 4096
"""Addresses in all."""
_Found = list[tuple[Any, ...]]


class KnownPeers:
    """Owns a task while it runs (`run`), and one lookup at a time for each name."""

    def __init__(self, config: Config, peers: Peers, engines: Callable[[], Iterable[Engine]]) -> None:
        self._config, self._peers, self._engines = config, peers, engines
        self._resolved: dict[str, tuple[str, ...]] = {}
        self._looking: dict[str, asyncio.Task[_Found | Exception]] = {}
        self._look = asyncio.Event()
        self._lookups, self._places = Tasks(), asyncio.Semaphore(LOOKUPS)

    def look(self) -> None:
        """An engine has come: meet its peers now."""
        self._look.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while self._config.known_peers:
                try:
                    await self._resolve()
                    addresses = tuple(each for every in self._resolved.values() for each in every)[:MOST]
                    for engine in self._engines():
                        if engine.session.attached:
                            self._peers.want(engine, addresses)
                except Exception:  # no thread for a lookup, perhaps
                    log.exception("known peers were not looked up; they are in a while")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._look.wait()
                self._look.clear()
        finally:
            await self._lookups.end()

    async def _look_up(self, address: str) -> _Found | Exception:
        """An error is returned: nobody may ask for it any more."""
        host, port = allow.split(address)
        look_up: Callable[[], _Found] = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            async with self._places:
                return await made("names", look_up, LOOKUP_S)
        except Exception as error:  # noqa: BLE001  told by whoever takes it
            return error

    async def _resolve(self) -> None:
        for address in self._config.known_peers:
            if address not in self._looking:
                self._looking[address] = self._lookups.spawn(self._look_up(address))
        await asyncio.wait(self._looking.values(), timeout=SOON_S)
        for address, looking in list(self._looking.items()):
            if looking.done():
                del self._looking[address]
                self._take(address, looking.result())

    def _take(self, address: str, found: _Found | Exception) -> None:
        """A name stands for all addresses that it has now. A name with a single address is dialled by its name where
        `allow_peers` admits that, for the certificate's sake. If it cannot be looked up the addresses of before
        hold."""
        host, port = allow.split(address)
        if isinstance(found, OSError | UnicodeError):
            log.debug("name not resolved", name=host, why=str(found))
            return
        if isinstance(found, Exception):
            raise found
        hosts = sorted({str(each[4][0]) for each in found})
        if len(hosts) == 1 and allow.admits(host, self._config.allow_peers):
            hosts = [host]
        self._resolved[address] = tuple(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts)
