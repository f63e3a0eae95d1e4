"""All daemons that `kvferry host` runs, each asked at its own REST service, which its record in the folder names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from kvferry.errors import KvferryError, Unavailable
from kvferry.schemas import EngineRecord, ErrorBody, Readiness, Standing, Totals
from kvferryd.commands.ask import at
from kvferryd.commands.ranks import BAD, FIGURES, SILENT, figures
from kvferryd.commands.say import error_line, table, wrong
from kvferryd.config import Config

IDLE = "idle"
HEADS: tuple[str, ...] = ("STATE", "DAEMON", "DEVICE", "SOCKET", "ENGINE", "REST", *FIGURES)


class Record(BaseModel):
    """The file that `kvferry host` writes beside a daemon's socket."""

    name: str
    device: str
    rest: str
    peer: str
    engine_socket: str


class Here(Record):
    """And what the daemon says. error: why it could not be asked; `ready` and `totals` are missing then."""

    ready: Readiness | None = None
    totals: Totals | None = None
    engines: list[EngineRecord] = []
    error: ErrorBody | None = None

    @property
    def state(self) -> str:
        if self.ready is None:
            return SILENT
        idle = not self.engines and len(self.ready.reasons) == 1  # the lack of an engine
        return IDLE if idle else self.ready.state.value

    @property
    def well(self) -> bool:
        """Whether it is ready, or idle without a warning, and nothing has failed."""
        if self.ready is None or (self.totals is not None and self.totals.failed_lately is not None):
            return False
        return self.state in (Standing.READY, IDLE) and not self.ready.warnings

    @property
    def serves(self) -> bool:
        """Whether it is ready or idle, whatever has failed."""
        return self.state in (Standing.READY, Standing.DEGRADED, IDLE)


def records(folder: Path) -> list[Record]:
    """By name. Raises KvferryError (`no_host`) where there is none."""
    try:
        told = filter(None, (path.read_bytes() for path in folder.glob("*.json")))  # empty: it is about to be written
        found = [Record.model_validate_json(each) for each in told]
    except (OSError, ValidationError) as error:
        raise Unavailable("no_host", f"a record of `kvferry host` cannot be read: {error}", field="--host",
                          value=folder, remedy="name the folder that kvferry host was given") from None  # fmt: skip
    if not found:
        raise Unavailable("no_host", "no `kvferry host` runs with this folder", field="--host", value=folder,
                          remedy="start it, or name the folder that it was given (--folder)")  # fmt: skip
    return sorted(found, key=lambda record: (len(record.name), record.name))


async def all_here(config: Config, folder: Path) -> list[Here]:
    return await asyncio.gather(*(_asked(config, record) for record in records(folder)))


async def _asked(config: Config, record: Record) -> Here:
    found = Here(**record.model_dump())
    try:
        async with at(config, record.rest) as daemon:
            found.engines, found.ready, found.totals = await asyncio.gather(
                daemon.engines(), daemon.ready(), daemon.totals()
            )
    except KvferryError as error:
        found.error = ErrorBody(code=error.code, message=error.message, remedy=error.remedy)
    return found


def here_text(found: Sequence[Here]) -> str:
    """A row for each daemon, and a line for all that is wrong."""
    rows = [
        (each.state, each.name, each.device, Path(each.engine_socket).name,
         ", ".join(f"{engine.engine_id} {engine.rank}/{engine.world_size}" for engine in each.engines) or "-",
         each.rest, *figures(each.totals))
        for each in found
    ]  # fmt: skip
    return "\n".join([table(HEADS, rows, "no daemon", bad=BAD), *_wrong(found)])


def _wrong(found: Sequence[Here]) -> Iterator[str]:
    for each in found:
        if each.error is not None:
            yield f"{each.name}: {error_line(each.error)}"
        if each.ready is not None:
            reasons = [] if each.state == IDLE else each.ready.reasons  # the lack of an engine is none here
            ready = each.ready.model_copy(update={"reasons": reasons})
            yield from (f"{each.name}: {line}" for line in wrong(ready, each.totals))
