"""A row of the table: a case moved several times from one engine to another, timed, counted and compared."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from kvferry.engine import EngineClient
from kvferry.errors import Malformed
from kvferry.router import RouterClient
from kvferry.schemas import TransferRecord
from kvferry.tables import BlockTable
from kvferryd.aio import together
from kvferryd.bench.gpu_cases import POISON, Case
from kvferryd.bench.gpu_engines import Engine, cpu_s
from kvferryd.bench.gpu_table import Row

AUTO = "auto"
ONCE = 1
"""The number of the only lease of a request, and of the only attempt."""


@dataclass(slots=True)
class Taken:
    """A repeat: seconds, and the transfer of every request on every rank of the reader, as (rank, id)."""

    seconds: float = 0.0
    transfers: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


async def measure(case: Case, way: str, source: Engine, reader: Engine, repeats: int, warm_up: int) -> Row:
    """Medians of `repeats`, one right after another: everything is published before the first of them is ordered.

    The last bytes to arrive are compared word by word, in blocks that held POISON before. Raises KvferryError:
    `wrong_bytes`, `other_way` when a forced way was not taken, what a transfer failed with.
    """
    ids = case.ids()
    tables = [[{"full": BlockTable.of(blocks)} for blocks in side] for side in ids]
    daemons = [*source.daemons, *reader.daemons]
    for number in range(warm_up):
        first = await receive(case, source, reader, await publish(case, source, tables[0]), tables[1])
        if number == 0:
            _check_way(way, await _records(reader, first))
    began = cpu_s(daemons)
    published = [await publish(case, source, tables[0]) for _ in range(repeats)]
    every = []
    for number, requests in enumerate(published):
        if number == repeats - 1:
            reader.wipe(POISON)
        every.append(await receive(case, source, reader, requests, tables[1]))
    used = (cpu_s(daemons) - began) / repeats / case.requests
    records = [request for taken in every for request in await _records(reader, taken)]
    _check_way(way, records)
    reader.synchronize()
    for rank, held in enumerate(reader.ranks):
        case.check(ids, rank, held.pool)
    return Row(
        way,
        case.name,
        case.nbytes,
        median(taken.seconds for taken in every),
        reading_s=_phase_s(records, "reading"),
        nixl_s=_phase_s(records, "nixl"),
        copy_s=_phase_s(records, "copy"),
        cpu_s=used,
        requests=case.requests,
        repeats=repeats,
        path=records[0][0].path,
    )


async def publish(case: Case, source: Engine, tables: list[dict[str, BlockTable]]) -> list[str]:
    """Every request of the case on every rank; returns their ids."""
    requests = [uuid.uuid4().hex for _ in range(case.requests)]

    async def one(client: EngineClient, request_id: str, given: Mapping[str, BlockTable]) -> None:
        await client.publish(request_id, given, case.tokens, lease=ONCE)

    each = list(zip(requests, tables, strict=True))
    await together(one(rank.client, *request) for rank in source.ranks for request in each)
    return requests


async def receive(
    case: Case, source: Engine, reader: Engine, requests: list[str], tables: list[dict[str, BlockTable]]
) -> Taken:
    """Order every request on every rank at once, and wait for the done events."""
    result = Taken(transfers={request_id: [] for request_id in requests})

    async def one(rank: int, request_id: str, taken: Mapping[str, BlockTable]) -> None:
        client = reader.ranks[rank].client
        received = await client.receive(request_id, taken, (0, case.tokens), source=source.source, attempt=ONCE)
        result.transfers[request_id].append((rank, received.transfer_id))

    each = list(zip(requests, tables, strict=True))
    began = time.perf_counter()
    await together(one(rank, *request) for rank in range(len(reader.ranks)) for request in each)
    result.seconds = time.perf_counter() - began
    return result


async def _records(reader: Engine, taken: Taken) -> list[list[TransferRecord]]:
    """For every request, the record that each rank's own daemon has."""
    found: list[list[TransferRecord]] = []
    routers = [RouterClient(daemon.url) for daemon in reader.daemons]
    try:
        for transfers in taken.transfers.values():
            found.append([await routers[rank].transfer(transfer_id) for rank, transfer_id in transfers])
    finally:
        for router in routers:
            await router.close()
    return found


def _check_way(way: str, records: list[list[TransferRecord]]) -> None:
    paths = {record.path for request in records for record in request}
    if way != AUTO and paths != {way}:
        raise Malformed("other_way", f"it went {' and '.join(sorted(paths))}, not {way}")


def _phase_s(records: list[list[TransferRecord]], phase: str) -> float | None:
    """Median over requests of the slowest rank's; None where no time was spent so."""
    slowest = [max(record.phases_ms.get(phase, 0.0) for record in request) for request in records]
    return median(slowest) / 1e3 or None
