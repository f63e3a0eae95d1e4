"""Blows in every state of a request, on both sides (a process dies, stands still, changes its mind), and what holds
after them.

The table, the runner and the check (`Scene.holds`) are one for all. A row is blow, victim, state and setting. How it
ended, and the times until everybody knew and until the next request was done, are printed at the end, and are in
docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from blows import ASKED, SUDDEN
from fleet import Daemons
from hosts import Host, host
from scene import APART, DIRECT, IN_UCX, RANKS, STAGED, STATES, Scene, Setting, scened

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
LONG_S, SHORT_S = 20.0, 2.0
"""Deadlines: where an end is to come without it, and where nothing else ends the request."""
VICTIMS = ("source daemon", "source engine", "reader daemon", "reader engine")
DAEMONS = ("source daemon", "reader daemon")
CHANGES = {
    "lease": {"revoke": ("reading", "verifying", "not quiet"), "withdraw": ("connecting", "reading", "verifying")},
    "request": {
        "abort": ("connecting", "reading"), "cancel": ("waiting", "reading"), "retry": ("reading", "not quiet"),
        "duplicate": ("waiting", "reading"), "twin": ("reading",),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    blow: str
    victim: str
    state: str
    setting: Setting = DIRECT

    def __str__(self) -> str:
        return f"{self.blow} the {self.victim}, {self.state}, {self.setting.name}"

    @property
    def deadline_s(self) -> float:
        return SHORT_S if self.blow in ("stop", "revoke", "withdraw", "retry", "twin") else LONG_S


def rows() -> Iterator[Row]:
    for blow, victim, state in itertools.product(("kill", "stop"), VICTIMS, STATES):
        yield Row(blow, victim, state)
        yield Row(blow, victim, state, RANKS)
    for victim, blows in CHANGES.items():
        for blow, states in blows.items():
            yield from (Row(blow, victim, state) for state in states)
    for blow, victim in (*itertools.product(("kill", "stop"), DAEMONS), ("withdraw", "lease")):
        yield Row(blow, victim, "reading", STAGED)
    yield from (Row("vanish", "line", state, APART) for state in STATES)
    for blow, state in itertools.product(("deafen", "unplug"), ("connecting", "reading")):
        yield Row(blow, "line", state, APART)


QUICK = (
    Row("kill", "source daemon", "reading"),
    Row("kill", "reader engine", "reading"),
    Row("stop", "reader daemon", "reading"),
    Row("withdraw", "lease", "reading"),
    Row("retry", "request", "reading"),
)
"""These run in `make test`."""
GATE = (Row("kill", "source daemon", "reading", RANKS), Row("vanish", "line", "reading", APART))
ABORTS = frozenset(
    {
        Row("kill", "reader daemon", "reading"),
        Row("kill", "reader daemon", "not quiet"),
        Row("kill", "reader engine", "reading"),
        Row("kill", "reader engine", "not quiet"),
        Row("kill", "reader daemon", "reading", RANKS),
        Row("kill", "reader daemon", "not quiet", RANKS),
        Row("kill", "reader engine", "reading", RANKS),
        Row("kill", "reader engine", "not quiet", RANKS),
        Row("kill", "reader daemon", "reading", STAGED),
    }
)
"""The rows in which UCX may end the source, which stands still while its reader dies: docs/reliability.md."""
ALL = sorted(rows(), key=lambda row: row.setting.name)
TOGETHER = 8
"""Rows that one of several pytest processes plays, one after another and on one scene, under `--dist loadgroup`."""


def marks(number: int, row: Row) -> list[pytest.MarkDecorator]:
    if row in QUICK:
        return [pytest.mark.xdist_group("quick rows")]
    together = pytest.mark.xdist_group(f"{row.setting.name}-{number // TOGETHER}")
    return [together, pytest.mark.slow if row in GATE else pytest.mark.long]


@pytest.fixture(scope="module")
async def scenes(daemons: Daemons) -> AsyncIterator[Callable[[Setting], object]]:
    """Scenes in turn, for all rows of a setting: what a row leaves behind the next one meets."""
    async with AsyncExitStack() as stack:
        open_: dict[str, Scene] = {}

        async def scene(setting: Setting) -> Scene:
            if setting.name not in open_ or open_[setting.name].broken:
                await stack.aclose()
                open_.clear()
                far: Host | None = stack.enter_context(host()) if setting.apart else None
                open_[setting.name] = await stack.enter_async_context(scened(daemons, setting, far))
            return open_[setting.name]

        yield scene


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=marks(number, row)) for number, row in enumerate(ALL)]
)
async def test_nothing_is_lost_torn_or_left_behind(
    scenes: Callable[[Setting], AsyncIterator[Scene]], row: Row, record_property: Callable[[str, object], None]
) -> None:
    scene: Scene = await scenes(row.setting)  # type: ignore[misc]
    scene.broken = True  # unless it comes to its end
    record_property("seen", await played(scene, row))
    scene.broken = False


@pytest.mark.xdist_group("quick rows")
def test_only_the_last_words_of_ucx_are_its_own() -> None:
    """A daemon's log names UCX and NIXL in every transfer."""
    own = '{"transport": "UCX", "phases_ms": {"nixl": 1.2}, "event": "ucp_worker.c:3071 UCX  WARN  not flushed"}'
    assert not IN_UCX.search(own)
    assert IN_UCX.search("[vm:676  :0:724] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout")
    assert IN_UCX.search("[vm:1:0:1] stubs.c:32   Fatal: transport error: Endpoint timeout")


async def played(scene: Scene, row: Row) -> list[str]:
    """The result: the row, how it ended, and after how many seconds it was noticed and recovered."""
    async with scene.brought(row.state, row.deadline_s) as request:
        if row in ABORTS:
            scene.aborts()
        began = time.monotonic()
        async with AsyncExitStack() as mending:
            if row.blow in SUDDEN:
                await SUDDEN[row.blow](scene, request, row.victim, mending)
                if (row.blow, row.victim) != ("stop", "source daemon"):
                    await request.goes_on()
            else:
                asked = asyncio.create_task(ASKED[row.blow](scene, request, row.victim, mending))
                await asyncio.sleep(0)
                await request.goes_on()
                await asked
            if row.state == "waiting":
                ordering = asyncio.create_task(scene.order(request))
                mending.push_async_callback(asyncio.wait, [ordering])
            await scene.noticed(request, row.victim)
            noticed = time.monotonic()
        await scene.revived()
        await scene.ended(request)
    assert "deadline" not in request.ends or row.deadline_s < LONG_S, "nothing but its deadline has ended it"
    await scene.holds(request)
    dead = ", and UCX ended " + " and ".join(scene.casualties) if scene.casualties else ""
    scene.casualties.clear()
    return [str(row), ", ".join(request.ends) + dead, f"{noticed - began:.2f}", f"{time.monotonic() - noticed:.2f}"]
