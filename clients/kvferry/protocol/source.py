"""One engine rank as a source: its leases, and the streams of those that read them."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.leases import Leases
from kvferry.protocol.packing import Packing
from kvferry.protocol.serving import Serving
from kvferry.protocol.values import Reading, Sizes

READINGS = 4096
"""Open on one stream at once, or twice the leases that may be held where that is more. A reader of ours never has more,
so the stream of one that does ends."""


class Source:
    """Hands on what its machines say to each other, in order, and returns what they say to the shell."""

    def __init__(self, limit: int) -> None:
        """limit: leases that may be held."""
        self.leases = Leases(limit)
        self.streams: dict[int, Serving] = {}

    def on(self, event: e.SourceEvent, now: float) -> list[e.SourceEffect]:
        """Raises KvferryError, as the machines do; then nothing has changed."""
        match event:
            case e.Connect(stream, who, announcing):
                most = max(READINGS, 2 * self.leases.limit)
                serving = self.streams[stream] = Serving(stream, who, most, announcing=announcing)
                return self._all(serving.on(event, now), now)
            case e.Disconnect(stream):
                serving = self.streams[stream]
                effects = self._all(serving.on(event, now), now)
                del self.streams[stream]
                return effects
            case e.Ask() | e.Pack() | e.Leave():
                serving = self.streams[event.reading.stream]
                return self._all(serving.on(event, now), now)
            case _:
                return self._all(self.leases.on(event, now), now)

    def _all(self, said: Iterable[e.LeasesEffect | e.ServingEffect], now: float) -> list[e.SourceEffect]:
        effects: list[e.SourceEffect] = []
        for each in said:
            match each:
                case e.Open() | e.Close() | e.Listen():
                    effects += self._all(self.leases.on(each, now), now)
                case e.Wait(reading) | e.Show(reading) | e.Over(reading):
                    effects += self._all(self.streams[reading.stream].on(each, now), now)
                case e.Announce(stream) | e.Withdraw(stream):
                    effects += self._all(self.streams[stream].on(each, now), now)
                case _:
                    effects.append(each)
        return effects

    def take(self, reading: Reading) -> e.Told | None:
        """The next thing to tell the reader; None where nothing is left to tell."""
        serving = self.streams.get(reading.stream)
        return None if serving is None else serving.take(reading.number)

    def packing(self, at: p.At) -> Packing | None:
        """It takes its events itself, and says nothing to other machines. None where it is over, or another one has
        taken its place."""
        serving = self.streams.get(at.reading.stream)
        return None if serving is None else serving.packing(at)

    def next_timer(self) -> float | None:
        return self.leases.next_timer()

    def check(self) -> None:
        self.leases.check()
        for stream, serving in self.streams.items():
            serving.check()
            assert serving.stream == stream

    def sizes(self) -> Sizes:
        sizes = {**self.leases.sizes(), "streams": len(self.streams)}
        for serving in self.streams.values():
            for name, size in serving.sizes().items():
                sizes[name] = sizes.get(name, 0) + size
        return sizes
