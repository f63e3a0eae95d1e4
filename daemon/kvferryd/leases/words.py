"""Validity words: how a reader knows, without asking, that a lease held while it read.

Every live lease has a word of registered host memory with a random value. The word is cleared before anybody is told
that the lease has ended. A reader that has all its bytes reads the word with NIXL: if it holds the value that the
reader was given, the lease held throughout. This takes a tenth of the time of a call (docs/decisions.md).
"""

from __future__ import annotations

import secrets

import numpy as np

from kvferryd.transport.read import Span


def drawn() -> int:
    """The value of a lease's word; never 0."""
    return secrets.randbits(63) + 1


class Words:
    """`limit` words, registered as a whole with the agent that serves the leases. Each that is held has a value that no
    other has."""

    def __init__(self, limit: int) -> None:
        self._words = np.zeros(limit, dtype=np.uint64)
        self._free = list(range(limit))
        self._at: dict[int, int] = {}
        """The address of each value."""

    @property
    def span(self) -> Span:
        return Span(self._words.ctypes.data, self._words.nbytes, "host")

    def hold(self, value: int) -> None:
        """Take a free word. There is one for every lease that may be live."""
        index = self._at[value] = self._free.pop()
        self._words[index] = value

    def address(self, value: int) -> int:
        """In the source daemon's address space."""
        return self._words.ctypes.data + 8 * self._at[value]

    def clear(self, value: int) -> None:
        """The word may hold anything: a peer that can write where it reads keeps no lease from ending by that."""
        index = self._at.pop(value)
        self._words[index] = 0
        self._free.append(index)

    def close(self) -> None:
        """Clear them all."""
        self._words[:] = 0
