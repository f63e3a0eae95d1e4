"""All ranks of the engines beside a daemon, each asked at its own REST service, which the roster names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import EngineRecord, ErrorBody, Readiness, Standing, Totals, TransferState
from kvferryd.commands.ask import at
from kvferryd.commands.say import error_line, rate, size, table, wrong
from kvferryd.config import Config

SILENT = "no answer"
BAD = (SILENT, Standing.NOT_READY.value, Standing.DEGRADED.value)
"""States of rows that are red."""
FIGURES: tuple[str, ...] = ("MOVING", "LEASES", "READ", "SERVED", "FAILED", "ARENAS", "PROCESS")
HEADS: tuple[str, ...] = ("STATE", "ENGINE", "RANK", "REST", *FIGURES)


class Rank(BaseModel):
    """The answer of a rank's daemon. error: why it could not be asked; `ready` and `totals` are missing then.
    read_bytes_per_s, served_bytes_per_s: since the look before, if there was one."""

    engine_id: str
    rank: int
    rest: str = ""
    ready: Readiness | None = None
    totals: Totals | None = None
    error: ErrorBody | None = None
    read_bytes_per_s: float | None = None
    served_bytes_per_s: float | None = None

    @property
    def state(self) -> str:
        return SILENT if self.ready is None else self.ready.state.value

    @property
    def well(self) -> bool:
        return self.ready is not None and self.ready.state is Standing.READY


async def ranks_of(config: Config, daemon: RouterClient) -> list[Rank]:
    """The ranks of every engine that the daemon serves, by engine and rank."""
    engines = await daemon.engines()
    wanted = [
        (engine, rank, daemon.url if rank == engine.rank else engine.rest.get(rank, ""))
        for engine in engines
        for rank in range(engine.world_size)
    ]
    return await asyncio.gather(*(_asked(config, *each) for each in wanted))


async def _asked(config: Config, engine: EngineRecord, rank: int, url: str) -> Rank:
    engine_id = engine.engine_id
    found = Rank(engine_id=engine_id, rank=rank, rest=url)
    if rank in engine.gone:
        remedy = "start its daemon again with the same roster; if it runs, see /readyz there"
        found.error = ErrorBody(code="rank_left", message=f"it was at {engine.gone[rank]}", remedy=remedy)
        return found
    if not url:
        found.error = ErrorBody(
            code="unknown_rest", message="its REST address is not known here",
            remedy="see that it has joined; a daemon whose `rest` is loopback is asked on its own host",
        )  # fmt: skip
        return found
    try:
        async with at(config, url) as daemon:
            engines, ready, totals = await asyncio.gather(daemon.engines(), daemon.ready(), daemon.totals())
    except KvferryError as error:
        found.error = ErrorBody(code=error.code, message=error.message, remedy=error.remedy)
        return found
    if not any(_is(each, engine_id, rank) for each in engines):
        found.error = ErrorBody(code="another_daemon", message=f"the daemon at {url} has no rank {rank} of {engine_id}")
        return found
    found.ready, found.totals = ready, totals
    return found


def _is(engine: EngineRecord, engine_id: str, rank: int) -> bool:
    return (engine.engine_id, engine.rank) == (engine_id, rank)


def ranks_text(found: Sequence[Rank], *, speeds: bool = False) -> str:
    """A row for each rank, and a line for all that is wrong. speeds: bytes a second that each reads and serves, too."""
    rows = [_row(each) for each in found]
    heads = HEADS
    if speeds:
        heads = (*HEADS, "READ/S", "SERVED/S")
        moved = ((rate(each.read_bytes_per_s), rate(each.served_bytes_per_s)) for each in found)
        rows = [(*row, *rates) for row, rates in zip(rows, moved, strict=True)]
    return "\n".join([table(heads, rows, "no engine has attached", bad=BAD), *_wrong(found)])


def _row(rank: Rank) -> tuple[str, ...]:
    return (rank.state, rank.engine_id, str(rank.rank), rank.rest or "-", *figures(rank.totals))


def figures(known: Totals | None) -> tuple[str, ...]:
    """Cells for the columns FIGURES."""
    if known is None:
        return ("-",) * len(FIGURES)
    return (
        str(sum(count for state, count in known.transfers.items() if not TransferState(state).ended)),
        str(sum(known.leases.get(state, 0) for state in ("publishing", "published"))),
        size(known.read_bytes), size(known.served_bytes), str(known.transfers.get(TransferState.FAILED, 0)),
        f"{size(known.staging_used_bytes)} of {size(known.staging_bytes)}", size(known.process_bytes),
    )  # fmt: skip


def _wrong(found: Sequence[Rank]) -> Iterator[str]:
    for each in found:
        name = f"{each.engine_id} rank {each.rank}"
        if each.error is not None:
            yield f"{name}: {error_line(each.error)}"
        if each.ready is not None:
            yield from (f"{name}: {line}" for line in wrong(each.ready, each.totals))
