"""All that the machines of a roster are told, and all that they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError


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


class Tell(NamedTuple):
    """The members now. Only the last that a stream was told counts."""

    streams: tuple[int, ...]
    members: Members


@dataclass(frozen=True, slots=True)
class Renew:
    """Join, by what proves us now and with what is to be said now."""


class Told(NamedTuple):
    """The seed has told a joining the members."""

    joining: int
    members: Members


class Ended(NamedTuple):
    """The stream of a joining is over. why: None where the seed has ended it."""

    joining: int
    why: KvferryError | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


class Begin(NamedTuple):
    """Open a stream to the seed."""

    joining: int


class End(NamedTuple):
    """Close the stream of a joining, if it has one: nothing is heard of it any more."""

    joining: int


class Know(NamedTuple):
    """The members are these from now on."""

    members: Members


class Alone(NamedTuple):
    """No joining holds. why: as the last that ended was told."""

    why: KvferryError


MemberEvent: TypeAlias = Renew | Told | Ended | Tick
MemberEffect: TypeAlias = Begin | End | Know | Alone
