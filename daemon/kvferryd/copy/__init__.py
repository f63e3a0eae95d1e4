"""The strided copy that serves gather, scatter and mapped alike, in two forms of equal shape.

`moves` turns a bound plan into moves: the segments of one length and the static rows that every one of them repeats.
A move becomes a `Batch` once either side has addresses: a region's, or a staging slot's, in which runs lie packed.
`host.copy` (numpy) and `cuda.Copier` (one Triton kernel) run batches. A run's place is segments[s] + rows[r] on
either side: rows are uploaded once per plan, segments are all that crosses the bus for a transfer. `zeros` makes
batches of what a plan leaves: their source is a page of zeros, and they go with the others.
"""

from kvferryd.copy.batch import Batch
from kvferryd.copy.chunks import Chunk, cut, cut_by_rank
from kvferryd.copy.moves import Move, mapped, moves, sample, zeros

__all__ = ["Batch", "Chunk", "Move", "cut", "cut_by_rank", "mapped", "moves", "sample", "zeros"]
