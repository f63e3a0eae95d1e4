"""The copy on a GPU: uploads, launches, and what they need in between. Imports everywhere; a `Copier` needs a GPU."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvferry.errors import Unavailable
from kvferry.memory import cuda
from kvferryd.copy.batch import PAGE_NBYTES, WIDEST, Batch, Side, Table
from kvferryd.copy.host import starts
from kvferryd.plan.axes import Ints

PROGRAMS = 16
"""Each takes one SM. The fewest that fill the link in a mapped read (two H200s, bench/copy_gpu.py): runs of 8 KiB need
12, runs of 256 bytes 16."""
TILE, WARPS, REGISTERS = 8192, 16, 128
"""Words that a program loads before it stores them, warps that do so, and the registers a thread may have for it."""
SUM_TILE = 2048
"""The keys of a sum take registers too."""
PIECES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PADDING = 1.125
"""How much wider a run's pieces may be than the run, in return for longer pieces."""
KEPT_NBYTES = 64 << 20
"""Static rows that stay on the GPU; of a plan with runs of one element they are some 10 MB."""
MOST_PIECES = 2**31 - 1
SCRATCH_NBYTES = 64 << 10


class Shape(NamedTuple):
    """The constants of a compiled kernel; see copy/kernel.py."""

    word: int
    piece: int
    padded: bool


@dataclass(slots=True, eq=False)
class _Scratch:
    """The places of one launch's entries and segments on the host and on the GPU. Free once `used` is reached."""

    host: cuda.Pinned
    address: int
    used: cuda.Event
    words: Ints
    """The host's memory, as an array."""


USUAL = tuple(Shape(WIDEST, piece, False) for piece in reversed(PIECES))
"""Shapes for runs aligned to 16 bytes that have a power of two of them, the longest first: other layouts need them."""


class NotPrepared(Exception):
    """A kernel or a table that a copy needs is not on the GPU, not yet or not any more: `prepare` brings it there."""


def load() -> tuple[Any, Any]:
    """torch, which brings Triton, and the kernel: seconds at the first time. Raises KvferryError (`triton_missing`)."""
    try:
        import torch

        from kvferryd.copy import kernel
    except ImportError as error:
        message = f"copies on a GPU need torch for CUDA and its Triton: {error}"
        remedy = "install a CUDA build of torch (it brings Triton), or set device = cpu"
        raise Unavailable("triton_missing", message, field="triton", remedy=remedy) from None
    return torch, kernel


class Copier:
    """Copies on one GPU, on any number of streams. `close` it. A single thread may `prepare` beside the one that
    copies."""

    def __init__(self, device: cuda.Device, sums: int = 0) -> None:
        """sums: an address, into which the runs are summed instead of being copied (`kernel.sum_runs`).

        Raises KvferryError: `triton_missing`.
        """
        self._torch, kernel = load()
        self.device, self._kernel = device, kernel.sum_runs if sums else kernel.copy_runs
        self._tile = SUM_TILE if sums else TILE
        self._sums: tuple[int, ...] = (sums,) if sums else ()
        self._fields: int = kernel.FIELDS.value
        self._compiled: dict[Shape, Any] = {}
        self._tables: OrderedDict[Table, int] = OrderedDict()
        self._scratch: list[_Scratch] = []
        with device:
            self._take(SCRATCH_NBYTES)  # page-locked memory takes milliseconds
            self.zeros = device.alloc(PAGE_NBYTES)
            """The address of the page of zeros."""
            with closing(device.stream()) as stream:
                stream.fill(self.zeros, PAGE_NBYTES)
                stream.synchronize()
        self._using = threading.Lock()
        """Held from reading the tables until the launch. After that `free` waits for the kernel."""

    def copy(self, batches: Sequence[Batch], stream: cuda.Stream, programs: int = PROGRAMS) -> int:
        """Put the batches on a stream, one launch for each width of word. Returns the number of launches.

        Addresses are raw: of this GPU, of a mapped peer, or of pinned host memory; nothing checks them. The batches of
        one call run in any order and at once. `programs`: SMs that it may take. Raises NotPrepared before anything is
        launched: `prepare`, then copy again.
        """
        groups = list(self._grouped(batches))
        with self.device, self._using:
            if not (_tables(groups) <= self._tables.keys() and {shape for shape, _ in groups} <= self._compiled.keys()):
                raise NotPrepared
            return self._launch(groups, stream, programs) if groups else 0

    def _launch(self, groups: list[tuple[Shape, list[Batch]]], stream: cuda.Stream, programs: int) -> int:
        words = sum(2 * len(batch.source.segments) + self._fields for _, found in groups for batch in found)
        scratch = self._take(8 * words)
        launches = self._fill(scratch, groups)
        try:
            stream.upload(scratch.address, scratch.host, 8 * words)
            for shape, entries, tiles in launches:
                grid = (min(programs, tiles), 1, 1)
                # Constants included: the compiled kernel's own launcher wants every parameter.
                constants = shape.word, shape.piece, self._tile, shape.padded
                self._compiled[shape][grid](entries, tiles, *self._sums, *constants, stream=stream.handle)
        finally:
            scratch.used.record(stream)
        return len(launches)

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Compile and upload what `copy` of such batches needs, so that the first transfer does not pay for it."""
        with self.device:
            self._drop_tables()
            groups = list(self._grouped(batches))
            for table in _tables(groups):
                if table not in self._tables:
                    self._upload(table)
            for shape, _ in groups:
                self.compile(shape)

    def compile(self, shape: Shape) -> None:
        """Have the kernel of this shape on the GPU."""
        with self.device:
            if shape not in self._compiled:
                self._compiled[shape] = self._compile(shape)

    def close(self) -> None:
        """Wait for every copy and give back all memory."""
        for scratch in self._scratch:
            scratch.used.synchronize()
            scratch.used.close()
            scratch.host.close()
            self.device.free(scratch.address)
        for address in (self.zeros, *self._tables.values()):
            self.device.free(address)
        self._scratch.clear()
        self._tables.clear()

    def _grouped(self, batches: Sequence[Batch]) -> Iterator[tuple[Shape, list[Batch]]]:
        """Batches by word; of each word one launch, with the pieces that suit the most of its bytes."""
        by_word: dict[int, list[Batch]] = {}
        for batch in batches:
            if len(batch):
                by_word.setdefault(batch.word, []).extend(_bounded(batch))
        for word, found in by_word.items():
            largest = max(found, key=lambda batch: batch.total_nbytes)
            piece = piece_words(largest.nbytes // word)
            padded = any(batch.nbytes // word % piece for batch in found)
            yield Shape(word, piece, padded), found

    def _fill(self, scratch: _Scratch, groups: list[tuple[Shape, list[Batch]]]) -> list[tuple[Shape, int, int]]:
        """Write entries and segments; returns (shape, address of the entries, tiles) for every launch."""
        words = scratch.words
        at = self._fields * sum(len(found) for _, found in groups)  # segments come after all entries
        entry, launches = 0, []
        for shape, found in groups:
            first, tile = entry, 0
            for batch in found:
                places = []
                for side in (batch.source, batch.destination):
                    words[at : at + len(side.segments)] = side.segments
                    places.append(scratch.address + 8 * at)
                    at += len(side.segments)
                in_run = -(-(batch.nbytes // shape.word) // shape.piece)
                pieces = len(batch) * in_run
                tiles = -(-pieces // (self._tile // shape.piece))
                words[entry : entry + self._fields] = (
                    tile,
                    tile + tiles,
                    pieces,
                    in_run,
                    batch.rows,
                    batch.nbytes // shape.word,
                    self._table(batch.source),
                    self._table(batch.destination),
                    *places,
                )
                entry += self._fields
                tile += tiles
            launches.append((shape, scratch.address + 8 * first, tile))
        return launches

    def _table(self, side: Side) -> int:
        """The address of a side's first row on the GPU."""
        self._tables.move_to_end(side.table)
        return self._tables[side.table] + 8 * side.first_row

    def _upload(self, table: Table) -> None:
        address = self.device.alloc(table.offsets.nbytes)
        with closing(self.device.stream()) as stream:
            stream.copy(address, table.offsets.ctypes.data, table.offsets.nbytes)
            stream.synchronize()
        with self._using:
            kept = self._tables.setdefault(table, address)
        if kept != address:  # another thread has uploaded it meanwhile
            self.device.free(address)

    def _drop_tables(self) -> None:
        """Free the least recently used tables, down to KEPT_NBYTES."""
        dropped = []
        with self._using:
            kept = sum(table.offsets.nbytes for table in self._tables)
            while kept > KEPT_NBYTES and len(self._tables) > 1:
                table, address = self._tables.popitem(last=False)
                kept -= table.offsets.nbytes
                dropped.append(address)
        for address in dropped:
            self.device.free(address)

    def _take(self, nbytes: int) -> _Scratch:
        """A free scratch of that size, kept for good: there are as many as copies have been under way at once."""
        for scratch in self._scratch:
            if scratch.host.nbytes >= nbytes and scratch.used.reached():
                return scratch
        nbytes = max(SCRATCH_NBYTES, 1 << (nbytes - 1).bit_length())
        host = self.device.pinned(nbytes)
        words = np.ctypeslib.as_array((ctypes.c_int64 * (nbytes // 8)).from_address(host.address))
        scratch = _Scratch(host, self.device.alloc(nbytes), self.device.event(), words)
        self._scratch.append(scratch)
        return scratch

    def _compile(self, shape: Shape) -> Any:
        """The kernel, loaded: it is launched without Triton's own dispatch, which takes 20 us and more."""
        warmup: Callable[..., Any] = self._kernel.warmup
        with self._torch.cuda.device(self.device.index):
            compiled = warmup(
                2**40,  # an address and a number of tiles: only their types count
                7,
                *self._sums,
                WORD=shape.word,
                PIECE=shape.piece,
                TILE=self._tile,
                PADDED=shape.padded,
                num_warps=WARPS,
                maxnreg=min(REGISTERS, 65536 // (32 * WARPS)),
                grid=(1, 1, 1),
            )
            # Loaded onto this GPU, and launched over no tiles: the driver does more at a kernel's first launch.
            with closing(self.device.stream()) as stream:
                constants = shape.word, shape.piece, self._tile, shape.padded
                compiled[(1, 1, 1)](2**40, 0, *self._sums, *constants, stream=stream.handle)
                stream.synchronize()
        return compiled


def erase(device: cuda.Device, batches: Iterable[Batch]) -> None:
    """Zeros over the destinations without a kernel, where Triton is missing: a fill for each run."""
    with device, closing(device.stream()) as stream:
        for batch in batches:
            for address in starts(batch.destination, batch.rows).tolist():
                stream.fill(address, batch.nbytes)
        stream.synchronize()


def _tables(groups: Iterable[tuple[Shape, list[Batch]]]) -> set[Table]:
    return {side.table for _, found in groups for batch in found for side in (batch.source, batch.destination)}


@functools.lru_cache(maxsize=1024)
def piece_words(words: int) -> int:
    """The longest piece in which runs of so many words waste little."""
    return max(piece for piece in PIECES if piece == 1 or -(-words // piece) * piece <= PADDING * words)


def _bounded(batch: Batch) -> list[Batch]:
    """The batch, cut along its segments so that its pieces can be counted in 31 bits."""
    segments, step = len(batch.source.segments), max(1, MOST_PIECES // (batch.rows * batch.nbytes))
    if step >= segments:
        return [batch]
    parts = (
        (side.part(first, step) for side in (batch.source, batch.destination)) for first in range(0, segments, step)
    )
    return [Batch(batch.nbytes, batch.rows, *sides) for sides in parts]
