"""All that packings are told, and all that they say. Some come with every chunk, and a tuple is made in a quarter of a
frozen dataclass's time."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.values import Reading, View


class At(NamedTuple):
    """A packing of a reading: its number is the reader's."""

    reading: Reading
    number: int


# ---- from the reader ----


class Want(NamedTuple):
    """The chunks that the reader wants, each once, and those that it has read. vouch: it has read all of them, one too
    late to know that it was still there."""

    at: At
    want: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    vouch: bool = False


# ---- from the shell ----


class WasCut(NamedTuple):
    """The chunks are those that the reader expects; or why they cannot be packed: problem."""

    at: At
    problem: KvferryError | None = None


class Gathered(NamedTuple):
    """All of the chunk is in a slot of its own, and nothing writes there any more; or problem."""

    at: At
    chunk: int
    problem: KvferryError | None = None


class Idle(NamedTuple):
    """The time that `SetIdle` named has come."""

    at: At


# ---- to the shell ----


class Cut(NamedTuple):
    """Cut this view of the lease into chunks, as the reader has. wanted: as of `Pack`. Answered by WasCut."""

    at: At
    wanted: object
    view: View


class Gather(NamedTuple):
    """Copy the chunk into a slot as soon as there is one. Answered by Gathered; from then on the slot keeps its bytes
    for KEPT_S, whatever ends, unless it is given back. behind: after the messages of now, since a launch takes a
    while."""

    at: At
    chunk: int
    behind: bool = False


class GiveBack(NamedTuple):
    """The chunk was read: its slot is free."""

    at: At
    chunk: int


class SetIdle(NamedTuple):
    """Answered by Idle at that time."""

    at: At
    when: float


class Forget(NamedTuple):
    """Nothing more is packed: no slot is wanted any more, and each that it has is free as soon as no copy is in it and
    its bytes need no longer be kept."""

    at: At


# ---- what a reader is told ----


class Packed(NamedTuple):
    """Chunks that are whole. vouched: every slot was held until it was read. problem: the packing is over, and no slot
    of it is held for longer than it is kept; the reading goes on."""

    at: At
    chunks: tuple[int, ...] = ()
    vouched: bool = False
    problem: KvferryError | None = None


PackingEvent: TypeAlias = Want | WasCut | Gathered | Idle
PackingEffect: TypeAlias = Cut | Gather | GiveBack | SetIdle | Forget
