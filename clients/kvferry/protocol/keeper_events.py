"""All that a keeper is told, and all that it says. Daemons are numbered in the order of their starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

TERM, KILL = 15, 9
"""Signals to a daemon: it drains and stops; it is no more."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The first daemon is to be started."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """No process could be made for the daemon."""

    daemon: int
    why: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The daemon has imported everything and read its settings: it takes at most `drain_s` to drain."""

    daemon: int
    drain_s: float


@dataclass(frozen=True, slots=True)
class Serves:
    daemon: int


@dataclass(frozen=True, slots=True)
class Died:
    """The daemon's process has ended. All that the daemon has said was heard before. how: in words."""

    daemon: int
    status: int
    how: str


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A wish: a daemon of the code and the settings of now is to serve."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A wish: the daemon that serves is to drain, and nothing follows. A second one: at once."""

    signal: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Start:
    daemon: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The daemon is the one to serve. why: what became of the one before; empty for the first."""

    daemon: int
    why: str


@dataclass(frozen=True, slots=True)
class Signal:
    daemon: int
    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A daemon serves: so the process that has started the keeper is told, once."""


@dataclass(frozen=True, slots=True)
class Stays:
    """The answer to every wish for an upgrade that came before this daemon's start: it did not load. A line, too."""

    daemon: int
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the operator."""

    what: str


@dataclass(frozen=True, slots=True)
class End:
    """The keeper ends, with this status of its last daemon (of a signal: its number below zero)."""

    status: int


KeeperEvent: TypeAlias = Begin | NotStarted | Loaded | Serves | Died | Upgrade | Stop | Tick
KeeperEffect: TypeAlias = Start | Turn | Signal | Ready | Stays | Report | End
