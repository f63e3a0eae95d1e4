"""The engines that read from ours, by their streams, for the daemon after this one. Readers of the daemon before are
awaited: they meet us again by themselves."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvferry.protocol.peers_wanted import GONE_S, HAD
from kvferry.protocol.values import ReaderId
from kvferryd.engine import Engine
from kvferryd.peers.remembered import Reader, Remembered

AWAITED_S = 3.0
"""The longest that peers of the daemon before keep the one that has taken over from being ready."""


@dataclass(slots=True)
class _Readers:
    """Ranks of other engines, each by engine id and rank."""

    awaited: set[tuple[str, int]] = field(default_factory=set)
    """Readers of the daemon before that have not come, until then."""
    until: float = 0.0
    streams: Counter[tuple[str, int]] = field(default_factory=Counter)
    left: dict[tuple[str, int], float] = field(default_factory=dict)
    """When those went that have not come back. They may be upgraded at this moment, as we are."""

    def still_awaited(self) -> set[tuple[str, int]]:
        if time.monotonic() >= self.until:
            self.awaited.clear()
        return self.awaited

    def noted(self) -> list[Reader]:
        since = time.monotonic() - GONE_S
        self.left = {reader: at for reader, at in [*self.left.items()][-HAD:] if at > since}
        reading = {*self.still_awaited(), *self.streams}
        return [(*reader, 0.0) for reader in reading] + [(*reader, at) for reader, at in self.left.items()]


class Inbound:
    def __init__(self, remembered: Remembered) -> None:
        self._remembered = remembered
        self._of: WeakKeyDictionary[Engine, _Readers] = WeakKeyDictionary()

    def expect(self, engine: Engine) -> None:
        """An engine has registered."""
        now, readers = time.monotonic(), self._remembered.of(engine.engine_id).readers
        awaited = {(engine_id, rank) for engine_id, rank, left_at in readers if not left_at or now < left_at + GONE_S}
        self._of[engine] = _Readers(awaited, now + AWAITED_S)

    def awaited(self, engine: Engine) -> int:
        """Readers of the daemon before this one that are to come before the engine is said to be ready."""
        readers = self._of.get(engine)
        return 0 if readers is None else len(readers.still_awaited())

    @contextlib.contextmanager
    def reading(self, engine: Engine, who: ReaderId) -> Iterator[None]:
        """A stream of this reader is open."""
        readers, reader = self._of.setdefault(engine, _Readers()), (who.engine_id, who.rank)
        readers.streams[reader] += 1
        readers.awaited.discard(reader)
        readers.left.pop(reader, None)
        self._note(engine, readers)
        try:
            yield
        finally:
            readers.streams[reader] -= 1
            if not readers.streams[reader]:
                del readers.streams[reader]
                readers.left[reader] = time.monotonic()
            if not engine.session.retiring:  # else it is we who end the stream
                self._note(engine, readers)

    def _note(self, engine: Engine, readers: _Readers) -> None:
        self._remembered.put(engine.engine_id, readers=readers.noted())
