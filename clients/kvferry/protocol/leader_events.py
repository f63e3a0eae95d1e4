"""All that rank 0's machine is told, and all that it says. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.attempts import Attempt, ReadingRank


@dataclass(frozen=True, slots=True)
class End:
    """An attempt has ended on this rank, as others are told. failed: it did not abort."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    code: str
    failed: bool


# ---- what it is told ----


@dataclass(frozen=True, slots=True)
class Lead:
    """An order is handed on. until: the deadline of all ranks."""

    part: int
    at: ReadingRank
    request_id: str
    attempt: Attempt
    ranks: tuple[int, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Whole:
    """All ranks have joined. instances: of their daemons."""

    part: int
    instances: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Incomplete:
    part: int
    why: KvferryError


@dataclass(frozen=True, slots=True)
class Heard:
    """A rank goes on with its part, which is kept elsewhere; or has ended it: done. code: why not."""

    part: int
    rank: int
    done: bool | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Unheard:
    """A rank takes no part, or cannot be followed. lost: it cannot be reached, and may go on."""

    part: int
    rank: int
    why: KvferryError
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """The pause is over. instance: of the rank's daemon by now; None where it has left."""

    part: int
    rank: int
    instance: str | None


@dataclass(frozen=True, slots=True)
class GaveUp:
    """This rank's own part has ended, and is not done."""

    part: int
    code: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """This rank takes no part in an attempt. until: it is told again until then."""

    end: End
    ranks: tuple[int, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Told:
    """A rank has answered what it was told; or lost: it could not be reached."""

    tell: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# ---- what it says ----


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait until all ranks have joined."""

    part: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Hand the order to a rank, and hear what it says."""

    part: int
    rank: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Before the rank is asked again."""

    part: int
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Close:
    """The part of a rank is over, whatever it may say. why: None where it never had the order."""

    part: int
    rank: int
    why: KvferryError | None


@dataclass(frozen=True, slots=True)
class Late:
    """The deadline has passed, and the rank has not ended: close its part with what it waits for."""

    part: int
    rank: int


@dataclass(frozen=True, slots=True)
class StopOwn:
    """KV is of use only if all ranks have it. code: why that rank has not."""

    part: int
    rank: int
    code: str


@dataclass(frozen=True, slots=True)
class Tell:
    """After a pause."""

    tell: int
    rank: int
    end: End
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more is asked of other ranks."""

    part: int


Event: TypeAlias = Lead | Whole | Incomplete | Heard | Unheard | Again | GaveUp | Refused | Told | Tick
Effect: TypeAlias = Gather | Ask | Pause | Close | Late | StopOwn | Tell | Finished
