"""An engine rank as a source: its leases, and the streams of those that read them."""

from __future__ import annotations

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
    """Hands each event to the machine that it is for. They call each other, and return what is said to the shell."""

    def __init__(self, limit: int) -> None:
        """limit: leases that may be held."""
        self.streams: dict[int, Serving] = {}
        self.leases = Leases(limit, self.streams)

    def on(self, event: e.SourceEvent, now: float) -> list[e.SourceEffect]:
        """Raises KvferryError, as the machines do; then nothing has changed."""
        match event:
            case e.Ask() | e.Pack() | e.Leave():
                return self.streams[event.reading.stream].on(event, now)
            case e.Connect(stream, who, announcing):
                assert stream not in self.streams
                most = max(READINGS, 2 * self.leases.limit)
                serving = self.streams[stream] = Serving(self.leases, stream, who, most, announcing=announcing)
                return serving.on(event, now)
            case e.Disconnect(stream):
                effects = self.streams[stream].on(event, now)
                del self.streams[stream]
                return effects
            case _:
                return self.leases.on(event, now)

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
