"""Blocks of the cache: how many requests hold each, and which of them hold a known prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np


def prefix_hashes(tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """One digest per full block of tokens; each stands for everything up to and including its block."""
    digest = b""
    ids = np.asarray(tokens, dtype=np.int64)
    for stop in range(block_size, len(ids) + 1, block_size):
        digest = hashlib.blake2b(digest + ids[stop - block_size : stop].tobytes(), digest_size=16).digest()
        yield digest


class BlockPool:
    """Reference-counted blocks. A block that holds a known prefix can still be found after its last holder has released
    it, until it is needed for something else (least recently used first)."""

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix; they are not held yet."""
        blocks = []
        for digest in hashes:
            if (block := self._block_of.get(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def take(self, found: Sequence[int], fresh: int) -> list[int] | None:
        """Hold the blocks `found` and `fresh` more; None, and nothing changed, when there are not enough."""
        idle = sum(1 for block in found if block in self._free)
        if len(self._free) - idle < fresh:
            return None
        for block in found:
            self._free.pop(block, None)
            self._holders[block] += 1
        blocks = [*found]
        for _ in range(fresh):
            block, _ = self._free.popitem(last=False)
            assert self._holders[block] == 0
            self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go; the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, digest: bytes) -> None:
        """The held block is full and holds the prefix `digest`. The first block to hold it is the one found."""
        assert self._holders[block] > 0
        if self._prefix_cache and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def _forget(self, block: int) -> None:
        if (digest := self._hash_of.pop(block, None)) is not None:
            del self._block_of[digest]
