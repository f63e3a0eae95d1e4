"""Places of daemons in the folder of `kvferry host`: for each a record, by which others find it, beside its sockets.

A place belongs to the process that holds its record's lock: what is there is written, and taken away, by that one only.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvferry.errors import KvferryError, Unavailable
from kvferry.memory.handover import SUFFIX
from kvferryd.host.plan import record_of
from kvferryd.memory.node import NodeDir, is_dead
from kvferryd.run.daemons import Daemon

NOTED = "places"
"""A file of a run's folder: the records of its places, a path a line."""


@contextmanager
def held(daemons: Sequence[Daemon], folder: Path) -> Iterator[None]:
    """Within it the places are ours, and say what each daemon is. folder: of this run. Raises KvferryError."""
    records = [*map(record_of, daemons)]
    (folder / NOTED).write_text("\n".join(map(str, records)))  # first of all, to be taken away
    records[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        for record, daemon in zip(records, daemons, strict=True):
            config = daemon.config
            told = {"name": daemon.name, "device": config.device, "rest": config.url, "peer": config.advertise,
                    "engine_socket": str(config.engine_socket)}  # fmt: skip
            descriptor = stack.enter_context(_lock(record))
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{json.dumps(told)}\n".encode())
        yield


def leave(folder: Path) -> None:
    """Take away what is at the places that are noted in a run's folder, but for those that another process has now."""
    with suppress(FileNotFoundError):
        for record in map(Path, (folder / NOTED).read_text().splitlines()):
            with suppress(KvferryError, OSError), _lock(record):
                for path in filter(
                    is_dead, NodeDir(record.parent).beside(record.stem)
                ):  # daemons that were killed left them
                    path.unlink(missing_ok=True)
                for suffix in (".sock", f".sock{SUFFIX}", ".json"):
                    record.with_suffix(suffix).unlink(missing_ok=True)


@contextmanager
def _lock(record: Path) -> Iterator[int]:
    """Its descriptor, whose end ends the lock. Raises KvferryError (`place_taken`), OSError."""
    while True:
        descriptor = os.open(record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _locked(descriptor):
                remedy = "give each a --folder of its own, or other GPUs: --gpus 0-3, and --gpus 4-7"
                what = f"another kvferry host has the place of {record.stem}"
                raise Unavailable("place_taken", what, field="--folder", value=record.parent, remedy=remedy)
            if _is(record, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, descriptor: int) -> bool:
    """The file is still there: it was not taken away before we held it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
