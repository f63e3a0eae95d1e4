"""The peers that the settings name: met before anybody waits for them, and again when they are not known any more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvferry.errors import KvferryError
from kvferryd.aio import Tasks
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers import allow
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.peers import Peers

log = logs.get(__name__)
LOOK_S = 2.0
"""Names are looked up again, and what is lost is noticed, so often."""
RESOLVE_S = 5.0
AGAIN_S = 60.0
"""The longest pause before an address that cannot be met is tried again; the first is a second."""
AT_ONCE = 32
LOOKUPS = 8
"""At once: threads of their own, since one that hangs cannot be ended, and others wait for asyncio's."""
MOST = 4096
"""Addresses in all."""


class KnownPeers:
    """Owns a task while it runs (`run`), and one for each handshake."""

    def __init__(self, config: Config, peers: Peers, engines: Callable[[], Iterable[Engine]]) -> None:
        self._config, self._peers, self._engines = config, peers, engines
        self._resolved: dict[str, tuple[str, ...]] = {}
        self._met: dict[tuple[Engine, str], PeerEngine] = {}
        self._meeting: set[tuple[Engine, str]] = set()
        self._failed: dict[tuple[Engine, str], tuple[int, float, str]] = {}
        """Of each that could not be met: how often in a row, not before when it is tried again, and the code."""
        self._tasks, self._turns = Tasks(), asyncio.Semaphore(AT_ONCE)
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
                    await asyncio.gather(*map(self._resolve, self._config.known_peers))
                    self._meet_all()
                except Exception:  # no thread for a lookup, perhaps
                    log.exception("known peers were not looked up; they are in a while")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._look.wait()
                self._look.clear()
        finally:
            for task in self._tasks:
                task.cancel()
            self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self, address: str) -> None:
        """A name stands for all addresses that it has now. One with a single address is dialled by its name where
        `allow_peers` admits that, for the certificate's sake. Where it cannot be looked up those of before hold."""
        host, port = allow.split(address)
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            log.debug("name not resolved", name=host, why=str(error))
            return
        hosts = sorted({str(each[4][0]) for each in found})
        if len(hosts) == 1 and allow.admits(host, self._config.allow_peers):
            hosts = [host]
        self._resolved[address] = tuple(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts)

    def _meet_all(self) -> None:
        addresses = [each for every in self._resolved.values() for each in every][:MOST]
        wanted = {(engine, address) for engine in self._engines() if engine.session.attached for address in addresses}
        self._met = {key: peer for key, peer in self._met.items() if key in wanted and not (peer.stale or peer.lost)}
        self._failed = {key: failed for key, failed in self._failed.items() if key in wanted}
        now = time.monotonic()
        for peer in self._met.values():
            peer.used_at = now
        for key in wanted - self._met.keys() - self._meeting:
            if key not in self._failed or self._failed[key][1] <= now:
                self._meeting.add(key)
                self._tasks.spawn(self._meet(*key))

    async def _meet(self, engine: Engine, address: str) -> None:
        key = engine, address
        try:
            async with self._turns:
                self._met[key] = await self._peers.meet(engine, address)
            self._failed.pop(key, None)
        except KvferryError as error:
            failures, _, before = self._failed.get(key, (0, 0.0, ""))
            self._failed[key] = failures + 1, time.monotonic() + min(AGAIN_S, 2.0 ** min(failures, 8)), error.code
            if error.code not in (before, "own_engine"):
                log.info("known peer not met", engine_id=engine.engine_id, address=address, why=str(error))
        finally:
            self._meeting.discard(key)
