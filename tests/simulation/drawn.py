"""The next steps of a run, by its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def drawn(rng: random.Random, these: Sequence[T]) -> Iterator[T]:
    """All of these in an order by chance, of which as much is drawn as is asked for: a step asks for few."""
    left = list(these)
    while left:
        yield left.pop(int(rng.random() * len(left)))
