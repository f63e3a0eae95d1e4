"""All that packings are told, and all that they say: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.values import Reading, View

Slot: TypeAlias = int
"""A slot of the staging arena; nobody else's until it is given back."""


class At(NamedTuple):
    """One packing of a reading: its number is the reader's."""

    reading: Reading
    number: int


# ---- from the reader ----


@dataclass(frozen=True, slots=True)
class Want:
    """The chunks that the reader wants, each once, and those that it has read. vouch: it has read all of them, one too
    late to know that it was still there."""

    at: At
    want: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    vouch: bool = False


# ---- from the shell ----


@dataclass(frozen=True, slots=True)
class WasCut:
    """The chunks are those that the reader expects; or why they cannot be packed: problem."""

    at: At
    problem: KvferryError | None = None


@dataclass(frozen=True, slots=True)
class Lent:
    """A slot for this chunk, which it answers with Copy; or why there is none: problem."""

    at: At
    chunk: int
    slot: Slot = 0
    problem: KvferryError | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """All of the chunk is in its slot, and nothing writes there any more; or problem."""

    at: At
    chunk: int
    problem: KvferryError | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    at: At


@dataclass(frozen=True, slots=True)
class Idle:
    """The time that `SetIdle` named has come."""

    reading: Reading


# ---- between the machines ----


@dataclass(frozen=True, slots=True)
class SetIdle:
    """at: None, not any more."""

    reading: Reading
    at: float | None


# ---- to the shell ----


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut this view of the lease into chunks, as the reader has. wanted: as of `Pack`. Answered by WasCut."""

    at: At
    wanted: object
    view: View


@dataclass(frozen=True, slots=True)
class AskSlot:
    """Answered by Lent."""

    at: At
    chunk: int


@dataclass(frozen=True, slots=True)
class ForgoSlot:
    """Not wanted any more; one that was lent meanwhile is free again."""

    at: At
    chunk: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Gather the chunk into the slot. Answered by Copied, unless the slot is given back first."""

    at: At
    chunk: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class Keep:
    """The slot keeps its bytes until then, whatever ends, unless it is given back."""

    at: At
    slot: Slot
    until: float


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The slot is free when no copy is in it any more. kept: nor before the time until which it keeps its bytes."""

    at: At
    slot: Slot
    kept: bool = False


@dataclass(frozen=True, slots=True)
class GoOnLater:
    """Say GoOn when what is to be told now has been told: to launch a copy takes a while."""

    at: At


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing more is packed of it."""

    at: At


# ---- what a reader is told ----


@dataclass(frozen=True, slots=True)
class Packed:
    """Chunks that are whole, each with its slot. vouched: every slot was held until it was read. problem: the packing
    is over, and no slot of it is held for longer than it is kept; the reading goes on."""

    at: At
    chunks: tuple[tuple[int, Slot], ...] = ()
    vouched: bool = False
    problem: KvferryError | None = None


PackingEvent: TypeAlias = Want | WasCut | Lent | Copied | GoOn
ArenaEffect: TypeAlias = Cut | AskSlot | ForgoSlot | Copy | Keep | GiveBack | GoOnLater | Forget
