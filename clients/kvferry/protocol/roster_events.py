"""All that the machines of a roster are told, and all that they say. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.session_events import Rank


class Member(NamedTuple):
    """A rank's daemon, as it says itself."""

    address: str
    draining: bool = False
    """It takes no new transfers."""
    rest: str = ""
    """The URL of its REST service."""
    instance: str = ""
    """Its start."""


Members: TypeAlias = Mapping[int, Member]
"""By rank."""


# ---- the seed ----


@dataclass(frozen=True, slots=True)
class Join:
    """A rank's daemon has opened a stream, and may join (`Rosters.refusal`)."""

    stream: int
    rank: Rank
    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    """The stream is over."""

    stream: int


@dataclass(frozen=True, slots=True)
class KeptOut:
    """A rank has called, and may not join."""

    engine_id: str
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """The members now. Only the last that a stream was told counts."""

    streams: tuple[int, ...]
    members: Members


SeedEvent: TypeAlias = Join | Left | KeptOut


# ---- a member ----


@dataclass(frozen=True, slots=True)
class Renew:
    """Join, by what proves us now and with what is to be said now."""


@dataclass(frozen=True, slots=True)
class Told:
    """The seed has told a joining the members."""

    joining: int
    members: Members


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream of a joining is over. why: None where the seed has ended it."""

    joining: int
    why: KvferryError | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Open a stream to the seed."""

    joining: int


@dataclass(frozen=True, slots=True)
class End:
    """Close the stream of a joining, if it has one: nothing is heard of it any more."""

    joining: int


@dataclass(frozen=True, slots=True)
class Know:
    """The members are these from now on."""

    members: Members


@dataclass(frozen=True, slots=True)
class Alone:
    """No joining holds. why: as the last that ended was told."""

    why: KvferryError


MemberEvent: TypeAlias = Renew | Told | Ended | Tick
MemberEffect: TypeAlias = Begin | End | Know | Alone
