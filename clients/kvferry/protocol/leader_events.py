"""All that rank 0's machine is told, and all that it says. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.attempts import Attempt, ReadingRank


class End(NamedTuple):
    """An attempt has ended on this rank, as others are told. failed: it did not abort."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    code: str
    failed: bool


# ---- what it is told ----


class Lead(NamedTuple):
    """An order is handed on. until: the deadline of all ranks."""

    part: int
    at: ReadingRank
    request_id: str
    attempt: Attempt
    ranks: tuple[int, ...]
    until: float


class Whole(NamedTuple):
    """All ranks have joined. instances: of their daemons."""

    part: int
    instances: Mapping[int, str]


class Incomplete(NamedTuple):
    part: int
    why: KvferryError


class Heard(NamedTuple):
    """A rank goes on with its part, which is kept elsewhere; or has ended it: done. code: why not."""

    part: int
    rank: int
    done: bool | None = None
    code: str = ""


class Unheard(NamedTuple):
    """A rank takes no part, or cannot be followed. lost: it cannot be reached, and may go on."""

    part: int
    rank: int
    why: KvferryError
    lost: bool = False


class Again(NamedTuple):
    """The pause is over. instance: of the rank's daemon by now; None where it has left."""

    part: int
    rank: int
    instance: str | None


class GaveUp(NamedTuple):
    """This rank's own part has ended, and is not done."""

    part: int
    code: str
    failed: bool


class Refused(NamedTuple):
    """This rank takes no part in an attempt. until: it is told again until then."""

    end: End
    ranks: tuple[int, ...]
    until: float


class Told(NamedTuple):
    """A rank has answered what it was told; or lost: it could not be reached."""

    tell: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# ---- what it says ----


class Gather(NamedTuple):
    """Wait until all ranks have joined."""

    part: int


class Ask(NamedTuple):
    """Hand the order to a rank, and hear what it says."""

    part: int
    rank: int


class Pause(NamedTuple):
    """Before the rank is asked again."""

    part: int
    rank: int
    seconds: float


class Close(NamedTuple):
    """The part of a rank is over, whatever it may say. why: None where it never had the order."""

    part: int
    rank: int
    why: KvferryError | None


class Late(NamedTuple):
    """The deadline has passed, and the rank has not ended: close its part with what it waits for."""

    part: int
    rank: int


class StopOwn(NamedTuple):
    """KV is of use only if all ranks have it. code: why that rank has not."""

    part: int
    rank: int
    code: str


class Tell(NamedTuple):
    """After a pause."""

    tell: int
    rank: int
    end: End
    seconds: float = 0.0


class Finished(NamedTuple):
    """Nothing more is asked of other ranks."""

    part: int


Event: TypeAlias = Lead | Whole | Incomplete | Heard | Unheard | Again | GaveUp | Refused | Told | Tick
Effect: TypeAlias = Gather | Ask | Pause | Close | Late | StopOwn | Tell | Finished
