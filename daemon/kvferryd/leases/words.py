"""Validity words: how a reader knows, without asking, that a lease held while it read.

Every live lease has a word of registered host memory with a random value. The word is cleared before anybody is told
that the lease has ended. A reader that has all its bytes reads the word with NIXL: if it holds the value that the
reader was given, the lease held throughout. This takes a tenth of the time of a call (docs/decisions.md).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from kvferryd.transport.read import Span


@dataclass(frozen=True, slots=True)
class Word:
    """`address`: in the source daemon's address space. `value`: what it holds while the lease does; never 0."""

    address: int
    value: int


class Words:
    """`limit` words, registered as a whole with the agent that serves the leases."""

    def __init__(self, limit: int) -> None:
        self._words = np.zeros(limit, dtype=np.uint64)
        self._free = list(range(limit))

    @property
    def span(self) -> Span:
        return Span(self._words.ctypes.data, self._words.nbytes, "host")

    def set(self) -> Word:
        """Take a free word. There is one for every lease that may be live."""
        index, value = self._free.pop(), secrets.randbits(63) + 1
        self._words[index] = value
        return Word(self._words.ctypes.data + 8 * index, value)

    def clear(self, word: Word) -> None:
        """The word may hold anything: a peer that can write where it reads keeps no lease from ending by that."""
        index = (word.address - self._words.ctypes.data) // 8
        self._words[index] = 0
        self._free.append(index)

    def close(self) -> None:
        """Clear them all."""
        self._words[:] = 0
