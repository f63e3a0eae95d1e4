"""Pages cannot be taken from under a daemon: it maps no file that somebody else can make shorter."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import Daemons
from lives import engine_on, reads_from

from kvferryd.memory.host import NAME

pytestmark = pytest.mark.anyio


def mapped_files(pid: int) -> list[Path]:
    """The engines' memory that the process maps, as files that we can open; UCX maps others, and lets go of them."""
    places = Path(f"/proc/{pid}/map_files")
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ours = [line for line in lines if line[1].startswith("rw-s") and NAME in line[-2]]
    return [places / "-".join(f"{int(end, 16):x}" for end in line[0].split("-")) for line in ours]


async def test_an_engine_that_truncates_its_memory_harms_nobody(daemons: Daemons, stack: AsyncExitStack) -> None:
    (theirs,), (ours,) = await daemons.start("source"), await daemons.start("reader")
    source, _ = await engine_on(stack, "source", theirs)
    reader, _ = await engine_on(stack, "reader", ours)
    cut = 0
    for daemon in (theirs, ours):
        for place in mapped_files(daemon.process.pid):
            cut += 1
            with pytest.raises(PermissionError), place.open("r+b") as file:
                file.truncate(0)
    assert cut >= 2, "the engines' memory was among them"
    await reads_from(reader, source, "r")
