"""All that a keeper is told, and all that it says. Daemons are numbered in the order of their starts."""

from __future__ import annotations

from typing import TypeAlias

from kvferry.protocol.frozen import frozen

TERM, KILL = 15, 9
"""Signals to a daemon: it drains and stops; it is no more."""


@frozen
class Begin:
    """The first daemon is to be started."""


@frozen
class NotStarted:
    """No process could be made for the daemon."""

    daemon: int
    why: str


@frozen
class Loaded:
    """The daemon has imported everything and read its settings: it takes at most `drain_s` to drain."""

    daemon: int
    drain_s: float


@frozen
class Serves:
    daemon: int


@frozen
class Died:
    """The daemon's process has ended. All that the daemon has said was heard before. how: in words."""

    daemon: int
    status: int
    how: str


@frozen
class Upgrade:
    """A wish: a daemon of the code and the settings of now is to serve."""


@frozen
class Stop:
    """A wish: the daemon that serves is to drain, and nothing follows. A second one: at once."""

    signal: int


@frozen
class Tick:
    """Time has passed."""


@frozen
class Start:
    daemon: int


@frozen
class Turn:
    """The daemon is the one to serve. why: what became of the one before; empty for the first."""

    daemon: int
    why: str


@frozen
class Signal:
    daemon: int
    number: int


@frozen
class Ready:
    """A daemon serves: so the process that has started the keeper is told, once."""


@frozen
class Stays:
    """The answer to every wish for an upgrade that came before this daemon's start: it did not load. A line, too."""

    daemon: int
    what: str


@frozen
class Report:
    """A line for the operator."""

    what: str


@frozen
class End:
    """The keeper ends, with this status of its last daemon (of a signal: its number below zero)."""

    status: int


KeeperEvent: TypeAlias = Begin | NotStarted | Loaded | Serves | Died | Upgrade | Stop | Tick
KeeperEffect: TypeAlias = Start | Turn | Signal | Ready | Stays | Report | End
