"""A descriptor that has an owner from the moment when it exists."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


class File:
    """Owns a descriptor. It is closed by `close`, and at the latest with the last reference: a thread that has nobody
    to give it to, and a loop that has ended, leave nothing open."""

    def __init__(self, number: int) -> None:
        self._number = number

    @classmethod
    def copies(cls, numbers: Sequence[int]) -> list[File]:
        """Raises OSError where this process may have no more."""
        copies: list[File] = []
        try:
            for number in numbers:
                copies.append(cls(os.dup(number)))
        except OSError:
            cls.close_all(copies)
            raise
        return copies

    @staticmethod
    def close_all(files: Iterable[File]) -> None:
        for file in files:
            file.close()

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self._number

    def detach(self) -> int:
        """The descriptor, which is the caller's from now on."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Idempotent."""
        if self._number >= 0:
            os.close(self.detach())

    __del__ = close

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
