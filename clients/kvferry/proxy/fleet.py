"""The fleet behind the proxy in one answer: a row for each pair of engines, what fails, what was slow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from kvferry import page
from kvferry.errors import Deadline, KvferryError
from kvferry.proxy.options import Endpoint
from kvferry.router import RouterClient
from kvferry.schemas import ErrorBody, PeerRecord, PeerState, Standing, TransferList, TransferRecord, TransferState

AT = "/fleet/"
FILES = page.files(__package__, AT)
EVERY_S, WHOLE_S = 2.0, 10.0
"""Daemons are asked no more often for their transfers, and for all else, however many look."""
PER_S = 32
"""Daemons that are asked in one second, on average: a look of a large fleet is older, and costs no more."""
PATIENCE_S = 2.0
"""For all answers of one daemon."""
AT_ONCE = 32
"""Daemons that are asked beside each other."""
WINDOW_S = 300.0
REMEMBERED = 4096
"""Ended transfers of one pair, at most: where more end within the window, the oldest are not counted."""
LISTED = 20
"""Failures, and slow transfers, the newest and the slowest."""
Role = Literal["prefill", "decode"]


class DaemonRow(BaseModel):
    """A daemon. url: of its REST service. engine: the URL of the engine that it stands beside. error: why there is no
    answer; the other fields are those of the last one then."""

    url: str
    role: Role
    engine: str
    rank: int
    engine_ids: list[str] = []
    version: str = ""
    ready: bool = False
    state: Standing | None = None
    reasons: list[str] = []
    warnings: list[str] = []
    error: ErrorBody | None = None


class PairRow(BaseModel):
    """Transfers from one engine to another.

    source, destination: URLs of the engines; source is empty where none of the proxy's prefill engines has this id.
    waits: what those under way wait for, by name. done, failed, aborted, bytes, p50_ms, p99_ms: of the last window_s
    seconds. p50_ms, p99_ms: without waits for order, reservation and publish. failing: ranks that do not answer the
    destination. error: of the last that failed in the window.
    """

    source: str
    source_engine_id: str
    destination: str
    engine_id: str
    under_way: int = 0
    waits: dict[str, int] = {}
    done: int = 0
    failed: int = 0
    aborted: int = 0
    bytes: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    path: str = ""
    failing: list[int] = []
    error: ErrorBody | None = None


class TransferRow(BaseModel):
    """A transfer that failed, or was slow. url: of the daemon that has its record. longest: the phase that took most of
    took_ms, and longest_ms of it."""

    url: str
    transfer_id: str
    request_id: str
    source_engine_id: str
    engine_id: str
    took_ms: float
    longest: str = ""
    longest_ms: float = 0.0
    ended_at: float
    error: ErrorBody | None = None


class FleetRecord(BaseModel):
    """asked_at: seconds since 1970."""

    asked_at: float
    window_s: float = WINDOW_S
    daemons: list[DaemonRow]
    pairs: list[PairRow]
    failures: list[TransferRow]
    slow: list[TransferRow]


PairKey = tuple[str, str]
"""The ids of the engine that is read, and of the one that reads."""
PHASES = ("waiting_order", "waiting_reservation", "waiting_publish", "connecting", "reading", "verifying")


@dataclass(slots=True)
class Ended:
    """A transfer that is over. at: when the proxy heard of it, on its own clock."""

    at: float
    record: TransferRecord


@dataclass(slots=True)
class Daemon:
    """A daemon as it was heard last."""

    row: DaemonRow
    cursor: str = ""
    under_way: list[TransferRecord] = field(default_factory=list)
    ended: dict[PairKey, deque[Ended]] = field(default_factory=dict)
    peers: list[PeerRecord] = field(default_factory=list)
    ended_s: float = 0.0
    """When the last of its transfers ended, by its own clock."""
    whole_at: float = float("-inf")
    """When it was asked for all else than its transfers."""

    def learn(self, said: TransferList, now: float) -> None:
        """A transfer that had ended before the first answer counts for nothing: nobody knows when it was. A daemon that
        has followed another tells all that the one before had, and only what has ended since is news."""
        first, self.cursor = not self.cursor, said.cursor
        known_s = self.ended_s if said.whole else float("-inf")
        self.under_way = [record for record in said.transfers if not record.state.ended]
        for record in said.transfers:
            if not record.state.ended:
                continue
            self.ended_s = max(self.ended_s, record.ended_at or 0.0)
            if not first and (record.ended_at or 0.0) > known_s:
                self.ended.setdefault(_pair(record), deque(maxlen=REMEMBERED)).append(Ended(now, record))
        self.forget(now)

    def forget(self, now: float) -> None:
        for pair, ended in list(self.ended.items()):
            while ended and ended[0].at < now - WINDOW_S:
                ended.popleft()
            if not ended:
                del self.ended[pair]

    def pairs(self) -> set[PairKey]:
        own = self.row.engine_ids
        met = {(peer.engine_id, engine_id) for peer in self.peers for engine_id in own}
        return met | set(self.ended) | {_pair(record) for record in self.under_way}


class Fleet:
    """Asks the daemons when somebody looks. `close` ends what is under way."""

    def __init__(
        self, prefills: Sequence[Endpoint], decodes: Sequence[Endpoint], clients: Mapping[str, RouterClient]
    ) -> None:
        """clients: of all daemons, by URL."""
        self._clients = clients
        self._daemons: dict[tuple[Role, str], Daemon] = {}
        roles: tuple[tuple[Role, Sequence[Endpoint]], ...] = ("prefill", prefills), ("decode", decodes)
        for role, endpoints in roles:
            for endpoint in endpoints:
                for rank, url in enumerate(endpoint.daemons):
                    row = DaemonRow(url=url, role=role, engine=endpoint.url, rank=rank)
                    self._daemons[role, url] = Daemon(row)
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._asking: asyncio.Task[FleetRecord] | None = None
        self._every_s = max(EVERY_S, len(self._daemons) / PER_S)
        self._asked = float("-inf")

    async def look(self) -> FleetRecord:
        """A little over EVERY_S old at most; a large fleet's is older. A daemon that does not answer is a row."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked > self._every_s):
            self._asking = asyncio.create_task(self._ask_all())
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _ask_all(self) -> FleetRecord:
        await asyncio.gather(*map(self._ask, self._daemons.values()))
        self._asked = time.monotonic()
        return record_of(list(self._daemons.values()))

    async def _ask(self, daemon: Daemon) -> None:
        row, client, now = daemon.row, self._clients[daemon.row.url], time.monotonic()
        whole = row.error is not None or now - daemon.whole_at > WHOLE_S
        try:
            async with self._turn, asyncio.timeout(PATIENCE_S):
                if row.role == "decode" and row.rank == 0:
                    daemon.learn(await client.changes(daemon.cursor, limit=1000), now)
                if whole:
                    await _ask_whole(daemon, client)
                    daemon.whole_at = now
        except TimeoutError:
            why = f"the daemon at {row.url} did not answer within {PATIENCE_S:g} s"
            row.error = ErrorBody.of(Deadline("daemon_timeout", why, field="daemon", value=row.url))
        except KvferryError as error:
            row.error = ErrorBody.of(error)
        else:
            row.error = None
        if row.error is not None:  # nothing is told as if it went on
            row.ready, row.state, daemon.under_way, daemon.peers = False, None, [], []
            daemon.forget(now)


async def _ask_whole(daemon: Daemon, client: RouterClient) -> None:
    row, readiness = daemon.row, await client.ready()
    row.ready, row.state = readiness.ready, readiness.state
    row.reasons, row.warnings = readiness.reasons, readiness.warnings
    row.version = (await client.info()).version
    row.engine_ids = [engine.engine_id for engine in await client.engines(manifests=False)]
    if row.role == "decode":
        daemon.peers = (await client.neighbours()).peers


def routes(fleet: Fleet, authorize: Callable[[Request], None]) -> APIRouter:
    """The page, and what it shows as JSON. authorize: raises KvferryError for who may not see it."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/v1/fleet", fleet.look, dependencies=[Depends(authorize)])
    router.include_router(page.routes(FILES))
    return router


def record_of(daemons: Sequence[Daemon]) -> FleetRecord:
    beside_prefill = [each.row for each in daemons if each.row.role == "prefill"]
    prefills = {engine_id: row.engine for row in beside_prefill for engine_id in row.engine_ids}
    rows: dict[tuple[str, PairKey], list[Daemon]] = {}
    for daemon in daemons:
        if daemon.row.role == "decode":
            for pair in daemon.pairs():
                rows.setdefault((daemon.row.engine, pair), []).append(daemon)
    pairs = [_pair_row(prefills.get(pair[0], ""), url, pair, ranks) for (url, pair), ranks in rows.items()]
    pairs.sort(key=lambda row: (not row.failed and not row.failing, row.source, row.source_engine_id, row.destination))
    ended = [(daemon, each) for daemon in daemons for of_pair in daemon.ended.values() for each in of_pair]
    failed = [(daemon, each) for daemon, each in ended if each.record.state is TransferState.FAILED]
    failed.sort(key=lambda both: both[1].at)
    slow = [(daemon, each) for daemon, each in ended if each.record.state is TransferState.DONE]
    slow.sort(key=lambda both: _took(both[1].record), reverse=True)
    return FleetRecord(
        asked_at=time.time(), daemons=[daemon.row for daemon in daemons], pairs=pairs,
        failures=[_transfer_row(*both) for both in failed[: -LISTED - 1 : -1]],
        slow=[_transfer_row(*both) for both in slow[:LISTED]],
    )  # fmt: skip


def _pair_row(source: str, destination: str, pair: PairKey, ranks: Sequence[Daemon]) -> PairRow:
    """ranks: the daemons of the engine that reads, which know of the pair."""
    under_way = [record for each in ranks for record in each.under_way if _pair(record) == pair]
    ended = [one.record for each in ranks for one in each.ended.get(pair, ())]
    states = Counter(record.state for record in ended)
    took = sorted(_took(record) for record in ended if record.state is TransferState.DONE)
    errors = (record.error for record in reversed(ended) if record.error is not None)
    peers = [peer for each in ranks for peer in each.peers if peer.engine_id == pair[0]]
    paths = (*(record.path for record in reversed(ended)), *(peer.path for peer in peers))
    return PairRow(
        source=source, source_engine_id=pair[0], destination=destination, engine_id=pair[1],
        under_way=len(under_way), waits=Counter(r.waits_for.value for r in under_way if r.waits_for is not None),
        done=states[TransferState.DONE], failed=states[TransferState.FAILED], aborted=states[TransferState.ABORTED],
        bytes=sum(record.bytes for record in ended), p50_ms=_quantile(took, 0.5), p99_ms=_quantile(took, 0.99),
        path=next(filter(None, paths), ""),
        failing=sorted({peer.rank for peer in peers if peer.state is PeerState.FAILING}),
        error=next(errors, None),
    )  # fmt: skip


def _transfer_row(daemon: Daemon, ended: Ended) -> TransferRow:
    record, (source, destination) = ended.record, _pair(ended.record)
    phases = [(record.phases_ms.get(name, 0.0), name) for name in PHASES]
    longest_ms, longest = max(phases)
    return TransferRow(
        url=daemon.row.url, transfer_id=record.transfer_id, request_id=record.request_id, source_engine_id=source,
        engine_id=destination, took_ms=record.took_ms or 0.0, longest=longest if longest_ms else "",
        longest_ms=longest_ms, ended_at=record.ended_at or 0.0, error=record.error,
    )  # fmt: skip


def _pair(record: TransferRecord) -> PairKey:
    return record.source.engine_id if record.source else "", record.engine_id


def _took(record: TransferRecord) -> float:
    """ms, without waits for order, reservation and publish."""
    phases = record.phases_ms
    return max(0.0, phases.get("total", record.took_ms or 0.0) - phases.get("waiting", 0.0))


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
