"""The fleet behind the proxy in one answer: a row for each pair of engines, what fails, what was slow."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from kvferry import page
from kvferry.errors import Deadline, KvferryError
from kvferry.proxy.options import Endpoint
from kvferry.router import RouterClient
from kvferry.schemas import (
    ErrorBody,
    FailedLately,
    PeerList,
    PeerState,
    Standing,
    TransferList,
    TransferRecord,
    TransferState,
    UnmetRecord,
)

AT = "/fleet/"
FILES = page.files(__package__, AT)
EVERY_S, WHOLE_S = 2.0, 10.0
"""Daemons are asked no more often for their transfers, and for all else, however many look."""
PER_S = 32
"""Daemons that are asked in one second, at most: a look of a large fleet is older, and costs no more."""
FIRST_PER_S, FIRST_S = 64, 2.0
"""The first look after a pause waits until all were asked: so many in a second, or as many as are asked in FIRST_S."""
PATIENCE_S = 2.0
"""For all answers of one daemon."""
UNSEEN_S = 10.0
"""Daemons are asked for so long after the last look; a page looks every 2 s."""
TOLD_S = 1.0
"""An answer is made no more often, however many look."""
WINDOW_S = 300.0
REMEMBERED = 4096
"""Ended transfers of one pair, at most: where more end within the window, the oldest are not counted."""
LISTED = 20
"""Failures, and slow transfers, the newest and the slowest."""
Role = Literal["prefill", "decode"]


class DaemonRow(BaseModel):
    """A daemon. url: of its REST service. engine: the URL of the engine that it stands beside. failed_lately: asked for
    where it is not `ready`. unmet: as it calls them in vain. error: why there is no answer; the other fields are those
    of the last one then."""

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
    failed_lately: FailedLately | None = None
    unmet: list[UnmetRecord] = []
    error: ErrorBody | None = None


class PairRow(BaseModel):
    """Transfers from one engine to another.

    source, destination: URLs of the engines; source is empty where none of the proxy's prefill engines has this id.
    waits: what those under way wait for, by name. done, failed, aborted, bytes, p50_ms, p99_ms: of the last window_s
    seconds. p50_ms, p99_ms: without waits for order, reservation and publish. failing: ranks that do not answer the
    destination, the ones that it has forgotten for that among them. error: of the last that failed in the window.
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
    """A transfer that failed, or was slow. url: of the daemon that has its record. took_ms: without the wait for order,
    reservation and publish. longest: the phase that took most of it, and longest_ms of it."""

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
    """asked_at: until then, seconds since 1970."""

    asked_at: float
    window_s: float = WINDOW_S
    daemons: list[DaemonRow]
    pairs: list[PairRow]
    failures: list[TransferRow]
    slow: list[TransferRow]


PairKey = tuple[str, str]
"""The ids of the engine that is read, and of the one that reads."""
PHASES = ("connecting", "reading", "verifying")


class Ended:
    """Transfers of one pair that ended in the last WINDOW_S, and their sums: a look walks over what has changed."""

    def __init__(self) -> None:
        self.records: OrderedDict[str, TransferRecord] = OrderedDict()
        """The key is the id, the order is that of their ends."""
        self.failed: OrderedDict[str, TransferRecord] = OrderedDict()
        self.states: Counter[TransferState] = Counter()
        self.took: list[tuple[float, str]] = []
        """ms and id of each that is done, the slowest last."""
        self.bytes = 0
        self.path = ""
        """The path of the last that had one."""

    def add(self, record: TransferRecord) -> None:
        """Nothing where it was heard before."""
        if record.transfer_id in self.records:
            return
        self.records[record.transfer_id] = record
        self.states[record.state] += 1
        self.bytes += record.bytes
        self.path = record.path or self.path
        if record.state is TransferState.FAILED:
            self.failed[record.transfer_id] = record
        if record.state is TransferState.DONE:
            insort(self.took, (_took(record), record.transfer_id))

    def forget(self, since: float) -> None:
        """Forget transfers that ended earlier, and the oldest beyond REMEMBERED."""
        while self.records:
            record = next(iter(self.records.values()))
            if len(self.records) <= REMEMBERED and (record.ended_at or 0.0) >= since:
                break
            del self.records[record.transfer_id]
            self.states[record.state] -= 1
            self.bytes -= record.bytes
            self.failed.pop(record.transfer_id, None)
            if record.state is TransferState.DONE:
                del self.took[bisect_left(self.took, (_took(record), record.transfer_id))]


@dataclass(slots=True)
class Daemon:
    """A daemon as it was heard last."""

    row: DaemonRow
    cursor: str = ""
    under_way: list[TransferRecord] = field(default_factory=list)
    ended: dict[PairKey, Ended] = field(default_factory=dict)
    """Its own clock says what is recent."""
    known: PeerList = field(default_factory=lambda: PeerList(peers=[]))
    ahead_s: float = 0.0
    """So far its clock is ahead of `time.monotonic` here."""
    whole_at: float = float("-inf")
    """When it was asked for all else than its transfers."""

    def learn(self, said: TransferList) -> None:
        """A daemon that has followed another tells again what the one before had told."""
        self.cursor, self.ahead_s = said.cursor, said.now - time.monotonic()
        self.under_way = [record for record in said.transfers if record.ended_at is None]
        since = said.now - WINDOW_S
        for record in sorted(said.transfers, key=lambda record: record.ended_at or 0.0):
            if record.ended_at is not None and record.ended_at >= since:
                self.ended.setdefault(_pair(record), Ended()).add(record)
        self.forget()

    def forget(self) -> None:
        since = time.monotonic() + self.ahead_s - WINDOW_S
        for pair, ended in list(self.ended.items()):
            ended.forget(since)
            if not ended.records:
                del self.ended[pair]

    def pairs(self) -> set[PairKey]:
        own = self.row.engine_ids
        met = {(peer.engine_id, engine_id) for peer in (*self.known.peers, *self.known.lost) for engine_id in own}
        return met | set(self.ended) | {_pair(record) for record in self.under_way}


class Fleet:
    """Asks the daemons while somebody looks, one after another and evenly: requests that the proxy relays meanwhile do
    not wait for a burst of answers. `close` ends what is under way."""

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
        self._asking: asyncio.Task[None] | None = None
        self._all_asked = asyncio.Event()
        self._looked = self._told = float("-inf")
        self._answer = b""

    async def look(self) -> Response:
        """A FleetRecord, a little over EVERY_S old at most; a large fleet's is older. A daemon that does not answer is
        a row."""
        self._looked = time.monotonic()
        if self._asking is None or self._asking.done():
            self._all_asked.clear()
            self._asking = asyncio.create_task(self._ask_while_seen())
        await self._all_asked.wait()
        if time.monotonic() - self._told > TOLD_S:
            self._answer = record_of(list(self._daemons.values())).model_dump_json().encode()
            self._told = time.monotonic()
        return Response(self._answer, media_type="application/json")

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _ask_while_seen(self) -> None:
        daemons = list(self._daemons.values())
        try:
            await self._ask_each(daemons, min(1 / FIRST_PER_S, FIRST_S / max(1, len(daemons))))
        finally:
            self._all_asked.set()
        await self._ask_each(cycle(daemons), max(EVERY_S / max(1, len(daemons)), 1 / PER_S))

    async def _ask_each(self, daemons: Iterable[Daemon], pause_s: float) -> None:
        async with asyncio.TaskGroup() as asked:
            for daemon in daemons:
                if time.monotonic() - self._looked > UNSEEN_S:
                    break
                asked.create_task(self._ask(daemon))
                await asyncio.sleep(pause_s)

    async def _ask(self, daemon: Daemon) -> None:
        row, client, now = daemon.row, self._clients[daemon.row.url], time.monotonic()
        whole = now - daemon.whole_at > WHOLE_S
        try:
            async with asyncio.timeout(PATIENCE_S):
                if row.role == "decode" and row.rank == 0:
                    daemon.learn(await client.changes(daemon.cursor, limit=1000))
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
            row.ready, row.state, row.unmet, daemon.whole_at = False, None, [], float("-inf")
            daemon.under_way, daemon.known = [], PeerList(peers=[])
            daemon.forget()


async def _ask_whole(daemon: Daemon, client: RouterClient) -> None:
    row, readiness = daemon.row, await client.ready()
    row.ready, row.state = readiness.ready, readiness.state
    row.reasons, row.warnings = readiness.reasons, readiness.warnings
    row.version = (await client.info()).version
    row.engine_ids = [engine.engine_id for engine in await client.engines(manifests=False)]
    well = row.state is Standing.READY
    row.failed_lately = None if well else (await client.totals()).failed_lately
    daemon.known = await client.neighbours() if row.role == "decode" or not well else PeerList(peers=[])
    row.unmet = daemon.known.unmet


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
    ended = [(daemon, of_pair) for daemon in daemons for of_pair in daemon.ended.values()]
    failed = [(daemon, record) for daemon, each in ended for record in islice(reversed(each.failed.values()), LISTED)]
    failed.sort(key=lambda both: both[0].ahead_s - (both[1].ended_at or 0.0))
    slow = [(daemon, each.records[name]) for daemon, each in ended for _, name in each.took[-LISTED:]]
    slow.sort(key=lambda both: _took(both[1]), reverse=True)
    return FleetRecord(
        asked_at=time.time(), daemons=[daemon.row for daemon in daemons], pairs=pairs,
        failures=[_transfer_row(*both) for both in failed[:LISTED]],
        slow=[_transfer_row(*both) for both in slow[:LISTED]],
    )  # fmt: skip


def _pair_row(source: str, destination: str, pair: PairKey, ranks: Sequence[Daemon]) -> PairRow:
    """ranks: the daemons of the engine that reads, which know of the pair."""
    under_way = [record for each in ranks for record in each.under_way if _pair(record) == pair]
    ended = next((each.ended[pair] for each in ranks if pair in each.ended), Ended())  # rank 0 alone is asked for them
    last = next(reversed(ended.failed.values()), None)
    peers = [peer for each in ranks for peer in each.known.peers if peer.engine_id == pair[0]]
    silent = [peer for peer in peers if peer.state is PeerState.FAILING]
    silent += [peer for each in ranks for peer in each.known.lost if peer.engine_id == pair[0]]
    paths = ended.path, *(peer.path for peer in peers)
    return PairRow(
        source=source, source_engine_id=pair[0], destination=destination, engine_id=pair[1],
        under_way=len(under_way), waits=Counter(r.waits_for.value for r in under_way if r.waits_for is not None),
        done=ended.states[TransferState.DONE], failed=ended.states[TransferState.FAILED],
        aborted=ended.states[TransferState.ABORTED], bytes=ended.bytes, p50_ms=_quantile(ended.took, 0.5),
        p99_ms=_quantile(ended.took, 0.99),
        path=next(filter(None, paths), ""),
        failing=sorted({peer.rank for peer in silent}),
        error=last.error if last else None,
    )  # fmt: skip


def _transfer_row(daemon: Daemon, record: TransferRecord) -> TransferRow:
    source, destination = _pair(record)
    phases = [(record.phases_ms.get(name, 0.0), name) for name in PHASES]
    longest_ms, longest = max(phases)
    return TransferRow(
        url=daemon.row.url, transfer_id=record.transfer_id, request_id=record.request_id, source_engine_id=source,
        engine_id=destination, took_ms=_took(record), longest=longest if longest_ms else "",
        longest_ms=longest_ms, ended_at=record.ended_at or 0.0, error=record.error,
    )  # fmt: skip


def _pair(record: TransferRecord) -> PairKey:
    return record.source.engine_id if record.source else "", record.engine_id


def _took(record: TransferRecord) -> float:
    """ms, without waits for order, reservation and publish."""
    phases = record.phases_ms
    return max(0.0, phases.get("total", record.took_ms or 0.0) - phases.get("waiting", 0.0))


def _quantile(took: Sequence[tuple[float, str]], share: float) -> float | None:
    return took[min(len(took) - 1, int(share * len(took)))][0] if took else None
