"""The peers that each engine of ours has, for the daemon after this one: in a file of the keeper's, which hands it to
each of its daemons in turn. An entry is an address to ask, or a name to wait for, and proves nothing."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from kvferry.file import File
from kvferry.protocol.kept import Latest
from kvferry.protocol.peers_events import Place
from kvferry.protocol.peers_wanted import HAD
from kvferryd.observe import logs

log = logs.get(__name__)
ENGINES = 64
"""Engines of ours; the one that met somebody last is kept for longest."""
MOST_NBYTES = 16 << 20
Reader: TypeAlias = "tuple[str, int, float]"
"""An engine id, a rank, and since when it does not read any more, by the host's monotonic clock; 0 while it does."""


class Known(NamedTuple):
    """Peers of an engine of ours. met: engines that it reads from; the one met last comes last. readers: of it."""

    met: tuple[Place, ...] = ()
    readers: tuple[Reader, ...] = ()


NOBODY = Known()


class Remembered:
    def __init__(self, file: File | None = None) -> None:
        """Without a file nothing is remembered."""
        self._file, self._known = file, Latest[str, Known](ENGINES)
        for engine_id, known in _read(file) if file is not None else ():
            self._known.put(engine_id, known)

    def of(self, engine_id: str) -> Known:
        return self._known.get(engine_id) or NOBODY

    def put(
        self, engine_id: str, *, met: Iterable[Place] | None = None, readers: Iterable[Reader] | None = None
    ) -> None:
        """None: as before."""
        before = self.of(engine_id)
        known = Known(
            before.met if met is None else tuple(met),
            before.readers if readers is None else tuple(sorted(readers)[:HAD]),
        )
        if self._file is None or known == before:
            return
        self._known.put(engine_id, known)
        said = json.dumps(dict(self._known.items())).encode()
        try:
            os.pwrite(self._file.fileno(), b"%08x %d\n%b" % (zlib.crc32(said), len(said), said), 0)
        except OSError as error:
            log.warning("peers not remembered for the next daemon", why=str(error))


def _read(file: File) -> list[tuple[str, Known]]:
    """Nothing of a file that is empty, that its daemon died over, or that another version has written."""
    try:
        head, _, rest = os.pread(file.fileno(), MOST_NBYTES, 0).partition(b"\n")
        if not head:
            return []
        crc, nbytes = head.split()
        said = rest[: int(nbytes)]
        if zlib.crc32(said) != int(crc, 16):
            raise ValueError("it is not whole")
        read = [(engine_id, _known(told)) for engine_id, told in json.loads(said).items()]
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        log.info("peers of the daemon before are not known", why=str(error))
        return []
    return read


def _known(told: object) -> Known:
    match told:
        case [[*met], [*readers]]:
            return Known(tuple(map(_place, met[-HAD:])), tuple(map(_reader, readers[:HAD])))
    raise ValueError(f"no peers: {told!r}")


def _place(told: object) -> Place:
    match told:
        case [str(engine_id), str(address)] if engine_id:
            return engine_id, address
    raise ValueError(f"no engine and address: {told!r}")


def _reader(told: object) -> Reader:
    match told:
        case [str(engine_id), int(rank), int(since) | float(since)]:
            return engine_id, rank, since
    raise ValueError(f"no engine, rank and time: {told!r}")
