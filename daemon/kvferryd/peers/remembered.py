"""The peers that each engine of ours has met, for the daemon after this one: in a file of the keeper's, which hands it
to each of its daemons in turn. An entry is an address to ask, and proves nothing."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable

from kvferry.file import File
from kvferry.protocol.kept import Latest
from kvferry.protocol.peers_events import Place
from kvferry.protocol.peers_wanted import HAD
from kvferryd.observe import logs

log = logs.get(__name__)
ENGINES = 64
"""Engines of ours; the one that met somebody last is kept for longest."""
MOST_NBYTES = 16 << 20


class Remembered:
    def __init__(self, file: File | None = None) -> None:
        """Without a file nothing is remembered."""
        self._file, self._places = file, Latest[str, tuple[Place, ...]](ENGINES)
        for engine_id, places in _read(file) if file is not None else ():
            self._places.put(engine_id, places)

    def of(self, engine_id: str) -> tuple[Place, ...]:
        """The engines that an engine of ours has met; the one met last comes last."""
        return self._places.get(engine_id) or ()

    def put(self, engine_id: str, places: Iterable[Place]) -> None:
        met = tuple(places)
        if self._file is None or met == self.of(engine_id):
            return
        self._places.put(engine_id, met)
        said = json.dumps(dict(self._places.items())).encode()
        try:
            os.pwrite(self._file.fileno(), b"%08x %d\n%b" % (zlib.crc32(said), len(said), said), 0)
        except OSError as error:
            log.warning("peers not remembered for the next daemon", why=str(error))


def _read(file: File) -> list[tuple[str, tuple[Place, ...]]]:
    """Nothing of a file that is empty, that its daemon died over, or that another version has written."""
    try:
        head, _, rest = os.pread(file.fileno(), MOST_NBYTES, 0).partition(b"\n")
        if not head:
            return []
        crc, nbytes = head.split()
        said = rest[: int(nbytes)]
        if zlib.crc32(said) != int(crc, 16):
            raise ValueError("it is not whole")
        read = [(engine_id, tuple(map(_place, places[-HAD:]))) for engine_id, places in json.loads(said).items()]
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        log.info("peers of the daemon before are not known", why=str(error))
        return []
    return read


def _place(told: object) -> Place:
    match told:
        case [str(engine_id), str(address)] if engine_id:
            return engine_id, address
    raise ValueError(f"no engine and address: {told!r}")
