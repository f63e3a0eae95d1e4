"""The parts of a file that outlives its daemon: slots of bytes, and rows of figures by time.

A file has a fixed size and is written in place. It is never mapped: a full disk and a file that somebody has cut are an
OSError, where memory would be a SIGBUS. Anything may be read, as a daemon may die between any two bytes.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.file import File

SLOT = struct.Struct("<QII")
"""Number, length, and the checksum of the number and what follows."""
BUCKETS, LEAST_MS, PER_DOUBLING = 60, 0.1, 3
"""Times are counted in buckets, each a quarter wider than the one before: 0.1 ms to 100 s. A figure that is made of
them is right to an eighth."""
CODES = 4
"""Different codes of failures in one row; failures of more count without."""
ROW = np.dtype([
    ("number", "<u4"), ("done", "<u4"), ("failed", "<u4"), ("aborted", "<u4"), ("read_bytes", "<u8"),
    ("served_bytes", "<u8"), ("codes", [("code", "<u2"), ("times", "<u2")], (CODES,)), ("took", "<u2", (BUCKETS,)),
])  # fmt: skip
"""number: of the period, since 1970. code: 0 is none."""
PACKED = struct.Struct(f"<IIIIQQ{2 * CODES}H{BUCKETS}H")
"""The same, of plain numbers: numpy would take ten times as long for one row."""
PLACES = {"done": 1, "failed": 2, "aborted": 3, "read_bytes": 4, "served_bytes": 5}
COUNTED, TOOK, ENTRIES = 6, 6 + 2 * CODES, 6 + 2 * CODES + BUCKETS
"""Places of the first code and of the first bucket, and how many there are."""
MOST = [(1 << 32) - 1] * 4 + [(1 << 64) - 1] * 2 + [(1 << 16) - 1] * (2 * CODES + BUCKETS)
"""Counts stop there."""
Figures = npt.NDArray[Any]
"""An array of ROW."""


def empty() -> list[int]:
    """A row of no period in which nothing is counted."""
    return [0] * ENTRIES


def add(row: list[int], figures: Mapping[str, int], code: int, took_ms: float | None) -> None:
    """figures: by name. code: the number of that of a failure; 0 for none."""
    for name, value in figures.items():
        if value:
            row[PLACES[name]] += value
    if code:
        _add_code(row, code, 1)
    if took_ms is not None:
        bucket = round(PER_DOUBLING * math.log2(max(took_ms, LEAST_MS) / LEAST_MS))
        row[TOOK + min(bucket, BUCKETS - 1)] += 1


def merge(row: list[int], more: list[int]) -> None:
    """Add the figures of another row."""
    for place, value in enumerate(more):
        if value and not COUNTED <= place < TOOK:
            row[place] = min(row[place] + value, MOST[place])
    for place in range(COUNTED, TOOK, 2):
        if more[place]:
            _add_code(row, more[place], more[place + 1])


def _add_code(row: list[int], code: int, times: int) -> None:
    for place in range(COUNTED, TOOK, 2):
        if row[place] in (0, code):
            row[place], row[place + 1] = code, min(row[place + 1] + times, MOST[place + 1])
            break


def quantiles(took: npt.NDArray[np.uint64], share: float) -> list[float | None]:
    """Milliseconds by nearest rank, for each row of counts by bucket; None where nothing was counted."""
    counted = np.cumsum(took, axis=1)
    found = np.argmax(counted >= np.ceil(share * counted[:, -1:].astype(float)), axis=1)
    times = LEAST_MS * 2 ** (found / PER_DOUBLING)
    return [round(float(ms), 3) if some else None for ms, some in zip(times, counted[:, -1], strict=True)]


class Slots:
    """`count` places of `nbytes` in the file, from `at` on."""

    def __init__(self, file: File, at: int, count: int, nbytes: int) -> None:
        self._file, self._at, self.count, self._nbytes = file, at, count, nbytes
        self.room, self.end = nbytes - SLOT.size, at + count * nbytes

    def put(self, index: int, number: int, data: bytes) -> None:
        """number: from 1. data: at most `room`. Raises OSError."""
        assert len(data) <= self.room
        checksum = zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little")))
        os.pwrite(self._file.fileno(), SLOT.pack(number, len(data), checksum) + data, self._at + index * self._nbytes)

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """(index, number, data) of each that is whole. Raises OSError."""
        held = _read(self._file, self._at, self.count * self._nbytes)
        for index in range(self.count):
            number, length, checksum = SLOT.unpack_from(held, index * self._nbytes)
            if number and length <= self.room:
                begins = index * self._nbytes + SLOT.size
                data = held[begins : begins + length]
                if zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little"))) == checksum:
                    yield index, number, data


class Rows:
    """Rings of `count` rows, a row for each period, and a ring for each of `lines`."""

    def __init__(self, file: File, at: int, period_s: int, count: int, lines: int) -> None:
        self._file, self._at, self.period_s, self._count = file, at, period_s, count
        self.end = at + lines * count * ROW.itemsize
        self._now: dict[int, list[int]] = {}
        """The row of each line that was written last."""

    def _row(self, line: int, now: float) -> list[int]:
        """The row of this period, to which figures are added before it is written. Raises OSError."""
        number, row = int(now) // self.period_s, self._now.get(line)
        if row is None or row[0] != number:
            row = [*PACKED.unpack(_read(self._file, self._place(line, number), PACKED.size))]
            if row[0] != number:
                row = empty()
                row[0] = number
            self._now[line] = row
        return row

    def add(self, line: int, now: float, figures: list[int]) -> None:
        """figures: a row, added to that of this period. Raises OSError."""
        row = self._row(line, now)
        merge(row, figures)
        os.pwrite(self._file.fileno(), PACKED.pack(*row), self._place(line, row[0]))

    def since(self, line: int, first_s: float, now: float) -> Figures:
        """The rows of periods that have not ended at `first_s` and have begun by `now`, the oldest first. Any thread;
        raises OSError."""
        held = _read(self._file, self._place(line, 0), self._count * ROW.itemsize)
        rows, last = np.frombuffer(held, ROW), int(now) // self.period_s
        first = max(int(first_s) // self.period_s, last - self._count + 1)
        rows = rows[(rows["number"] >= first) & (rows["number"] <= last)]
        return rows[np.argsort(rows["number"])]

    def _place(self, line: int, number: int) -> int:
        return self._at + (line * self._count + number % self._count) * ROW.itemsize


def _read(file: File, at: int, nbytes: int) -> bytes:
    """Zeros where the file ends before that."""
    return os.pread(file.fileno(), nbytes, at).ljust(nbytes, b"\0")
