"""The peers that the settings name: their names are looked up again and again, and every engine of ours is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

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
LOOKUPS = 8
"""At once: threads of their own, since one that hangs cannot be ended, and others wait for asyncio's."""
MOST = 4096
"""Addresses in all."""
_Found = list[tuple[Any, ...]]


class KnownPeers:
    """Owns a task while it runs (`run`), and one lookup at a time for each name."""

    def __init__(self, config: Config, peers: Peers, engines: Callable[[], Iterable[Engine]]) -> None:
        self._config, self._peers, self._engines = config, peers, engines
        self._resolved: dict[str, tuple[str, ...]] = {}
        self._looking: dict[str, asyncio.Future[_Found]] = {}
        self._look = asyncio.Event()
        self._lookups = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="names")

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
            for looking in self._looking.values():
                looking.cancel()
            self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        for address in self._config.known_peers:
            if address not in self._looking:
                host, port = allow.split(address)
                look_up: Callable[[], _Found] = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
                self._looking[address] = loop.run_in_executor(self._lookups, look_up)
        await asyncio.wait(self._looking.values(), timeout=SOON_S)
        for address, looking in list(self._looking.items()):
            if looking.done():
                del self._looking[address]
                self._take(address, looking)

    def _take(self, address: str, looking: asyncio.Future[_Found]) -> None:
        """A name stands for all addresses that it has now. A name with a single address is dialled by its name where
        `allow_peers` admits that, for the certificate's sake. If it cannot be looked up the addresses of before
        hold."""
        host, port = allow.split(address)
        try:
            found = looking.result()
        except (OSError, UnicodeError) as error:
            log.debug("name not resolved", name=host, why=str(error))
            return
        hosts = sorted({str(each[4][0]) for each in found})
        if len(hosts) == 1 and allow.admits(host, self._config.allow_peers):
            hosts = [host]
        self._resolved[address] = tuple(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts)
