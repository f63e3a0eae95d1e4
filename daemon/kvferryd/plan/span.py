"""Ranges on a global axis, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range [start, stop) on a global axis, for example KV heads."""

    start: int
    stop: int

    def __and__(self, other: Span) -> Span | None:
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class Uncovered(Exception):
    """No holder has the first position of `missing`."""

    def __init__(self, missing: Span) -> None:
        super().__init__(f"nobody holds {missing}")
        self.missing = missing


def cover(wanted: Span, held: Sequence[Span], reader: int = 0) -> list[tuple[int, Span]]:
    """Choose holders so that every position of `wanted` is taken exactly once.

    Where several hold a position the readers take turns, so that replicas share the load: reader r takes the
    (r modulo n)-th of n. Returns (index into `held`, part) in ascending order; raises `Uncovered`.
    """
    parts, at = [], wanted.start
    while at < wanted.stop:
        holders = [i for i, span in enumerate(held) if span.start <= at < span.stop]
        if not holders:
            raise Uncovered(Span(at, wanted.stop))
        chosen = holders[reader % len(holders)]
        part = Span(at, min(wanted.stop, held[chosen].stop))
        parts.append((chosen, part))
        at = part.stop
    return parts
