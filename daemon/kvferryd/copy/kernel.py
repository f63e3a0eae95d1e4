"""The kernels: a copy of runs, and a sum of them. Imports Triton: only `copy.cuda` imports this, once a GPU is asked
for."""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(10)
"""int64 words of an entry: first tile, one past its last tile, pieces, pieces in a run, rows, words in a run, and the
addresses of the source's and the destination's rows, the source's and the destination's segments."""


@triton.jit(do_not_specialize=["entries", "tiles"])  # type: ignore[untyped-decorator, unused-ignore]
def copy_runs(  # type: ignore[no-untyped-def]
    entries,
    tiles,
    WORD: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):
    """Every batch of one transfer, by a fixed number of programs.

    entries: address of the batches. A run is cut into pieces of PIECE words of WORD bytes; a tile is TILE words, that
    is TILE // PIECE pieces, all of which are loaded before the first is stored: bytes in flight are what counts over
    NVLink. Addresses are computed once for a piece. PADDED: the last piece of a run may be shorter.
    """
    # Triton has no 16-byte type: two neighbouring 8-byte elements become one access.
    UNITS: tl.constexpr = 2 if WORD == 16 else 1  # noqa: N806
    UNIT: tl.constexpr = WORD // UNITS  # noqa: N806
    ACCESS: tl.constexpr = (  # noqa: N806
        tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    )
    entry = entries.to(tl.pointer_type(tl.int64))
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        while tl.load(entry + 1) <= tile:
            entry += FIELDS
        source, destination, live, part = _tile(entry, tile, WORD, PIECE, TILE)
        source = tl.multiple_of(source.to(tl.pointer_type(ACCESS)), WORD)
        destination = tl.multiple_of(destination.to(tl.pointer_type(ACCESS)), WORD)
        inside, mask = _inside(entry, live, part, UNITS, PIECE, PADDED)
        values = tl.load(source[:, None, None] + inside, mask=mask, eviction_policy="evict_first")
        tl.store(destination[:, None, None] + inside, values, mask=mask)


@triton.jit(do_not_specialize=["entries", "tiles", "sums"])  # type: ignore[untyped-decorator, unused-ignore]
def sum_runs(  # type: ignore[no-untyped-def]
    entries,
    tiles,
    sums,
    WORD: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):
    """The sums of copy/sums.py, of runs where they lie. A run's destination is its place in a chunk, and in the upper
    half the chunk's number. sums: address of the chunks' sums, to which every tile adds its part."""
    UNITS: tl.constexpr = 2 if WORD == 16 else 1  # noqa: N806
    UNIT: tl.constexpr = WORD // UNITS  # noqa: N806
    ACCESS: tl.constexpr = (  # noqa: N806
        tl.uint64 if UNIT == 8 else tl.uint32 if UNIT == 4 else tl.uint16 if UNIT == 2 else tl.uint8
    )
    entry = entries.to(tl.pointer_type(tl.int64))
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        while tl.load(entry + 1) <= tile:
            entry += FIELDS
        source, place, live, part = _tile(entry, tile, WORD, PIECE, TILE)
        source = tl.multiple_of(source.to(tl.pointer_type(ACCESS)), WORD)
        inside, mask = _inside(entry, live, part, UNITS, PIECE, PADDED)
        values = tl.load(source[:, None, None] + inside, mask=mask, other=0).to(tl.uint64)
        at = (place & 0xFFFFFFFF).to(tl.uint64)[:, None, None] + inside * UNIT
        if UNIT == 8:
            found = (values & 0xFFFFFFFF) * _key(at // 4) + (values >> 32) * _key(at // 4 + 1)
        else:
            found = (values << (at % 4 * 8)) * _key(at // 4)
        chunk = tl.load(tl.load(entry + 9).to(tl.pointer_type(tl.int64))) >> 32  # the same for all of a batch
        tl.atomic_add(sums.to(tl.pointer_type(tl.uint64)) + chunk, tl.sum(found), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile(  # type: ignore[no-untyped-def]
    entry,
    tile,
    WORD: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """For each piece of a tile: where it begins on either side, whether there is one, and which one of its run it
    is."""
    PIECES: tl.constexpr = TILE // PIECE  # noqa: N806
    nth = tl.arange(0, PIECES).to(tl.uint32)
    piece = (tile - tl.load(entry)).to(tl.uint32) * PIECES + nth
    live = piece < tl.load(entry + 2).to(tl.uint32)
    in_run = tl.load(entry + 3).to(tl.uint32)
    rows = tl.load(entry + 4).to(tl.uint32)
    run = piece // in_run
    part = piece - run * in_run
    segment = run // rows
    row = run - segment * rows
    source = tl.load(tl.load(entry + 6).to(tl.pointer_type(tl.int64)) + row, mask=live, other=0)
    destination = tl.load(tl.load(entry + 7).to(tl.pointer_type(tl.int64)) + row, mask=live, other=0)
    source += tl.load(tl.load(entry + 8).to(tl.pointer_type(tl.int64)) + segment, mask=live, other=0)
    destination += tl.load(tl.load(entry + 9).to(tl.pointer_type(tl.int64)) + segment, mask=live, other=0)
    begin = part.to(tl.int64) * (PIECE * WORD)
    return source + begin, destination + begin, live, part


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _inside(  # type: ignore[no-untyped-def]
    entry,
    live,
    part,
    UNITS: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):
    """The units of a piece, and which of them there are."""
    LANES: tl.constexpr = PIECE if PIECE < 32 else 32  # noqa: N806
    # Pieces come first, so that Triton gives each warp a piece of its own and its addresses to one thread only once.
    inside = tl.arange(0, PIECE // LANES)[None, :, None] * (LANES * UNITS) + tl.arange(0, LANES * UNITS)[None, None, :]
    mask = live[:, None, None]
    if PADDED:
        left = (tl.load(entry + 5).to(tl.uint32) - part * PIECE).to(tl.int32) * UNITS
        mask = mask & (inside < left[:, None, None])
    return inside, mask


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _key(at):  # type: ignore[no-untyped-def]
    """`copy.sums.keys`."""
    mixed = (at + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return (mixed ^ (mixed >> 31)) | 1
