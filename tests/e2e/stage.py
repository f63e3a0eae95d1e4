"""The stage that tests of the proxy and of the engines behind it share: no test may end any of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferryd.demo.fleet import DaemonService, Fleet, Service

LEASE_TTL_S = 600
"""Long beside every wait of a test: what is freed sooner was freed by an abort."""
START_S = 240
"""Seconds until all are up, on a machine with other work."""


@dataclass(frozen=True)
class Stage:
    prefill_daemon: DaemonService
    decode_daemons: list[DaemonService]
    prefill: Service
    decode: Service
    bare: Service
    """Without a prefix cache, so that the same blocks are used again. It computes what it cannot load."""
    alone: Service
    proxies: dict[str, Service]
    """Proxies by who orders; their decode engine is `decode`."""
    bare_proxies: dict[str, Service]


@contextmanager
def staged() -> Iterator[Stage]:
    fleet = Fleet()
    try:
        ttl = ("--lease-ttl-s", str(LEASE_TTL_S))
        first, second = fleet.daemon("prefill-0", flags=ttl), fleet.daemons("decode", 2, flags=ttl)
        third = fleet.daemons("bare", 1)
        asyncio.run(fleet.ready(*fleet.services, timeout_s=START_S))  # an engine waits ten seconds for its daemon
        prefill = fleet.engine("prefill", preset="tiny", block_size=8, daemons=[first])
        decode = fleet.engine("decode", preset="tiny", tp=2, layout="HND", block_size=5, num_blocks=100, daemons=second)
        flags = ("--no-prefix-cache", "--on-load-failure", "recompute")
        bare = fleet.engine("bare", preset="tiny", block_size=5, daemons=third, flags=flags)
        alone = fleet.engine("alone", preset="tiny", flags=("--no-prefix-cache",))

        def proxies(decode: Service, daemons: list[DaemonService]) -> dict[str, Service]:
            return {
                order: fleet.proxy(prefill, decode, prefill_daemons=[first], decode_daemons=daemons, order=order)
                for order in ("engine", "router")
            }

        stage = Stage(first, second, prefill, decode, bare, alone, proxies(decode, second), proxies(bare, third))
        asyncio.run(fleet.ready(*fleet.services, timeout_s=START_S))
        yield stage
    finally:
        fleet.close()
