"""All that the machine of an engine's sessions is told, and all that it says. Sessions are named by their ids."""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.frozen import frozen


class Rank(NamedTuple):
    """A rank of one start of an engine."""

    engine_id: str
    epoch: str
    rank: int
    world_size: int


class Step(enum.Enum):
    """A session that retires has these to end, in this order."""

    TRANSFERS = "end its transfers, and its place among others"
    REGISTRATION = "end its registration"
    LEASES = "end its leases"
    FENCES = "close its fences"
    STOP = "stop what reads and writes its memory"
    FREE = "free its regions"


# ---- events ----


@frozen
class Attach:
    """An engine wants a session, of an id that is new. resume: the session before, whose memory goes on in this one."""

    session: str
    rank: Rank
    resume: str = ""


@frozen
class GiveUp:
    """The engine that is to be attached has gone."""

    session: str


@frozen
class Introduced:
    """The process is known: its death will be told."""

    session: str


@frozen
class Allocated:
    """A region has come. owned: by the daemon, so that it may wait for the next session."""

    session: str
    owned: bool


@frozen
class RegistrationBegun:
    session: str


@frozen
class RegistrationOver:
    """stopped: where it has failed, whether what it had begun neither reads nor writes any more."""

    session: str
    done: bool
    stopped: bool


@frozen
class StreamEnded:
    """The engine may live, die, or be dead already."""

    session: str


@frozen
class Died:
    """The process is dead: it does not touch its memory any more."""

    session: str


@frozen
class Leave:
    """The engine goes, and leaves its memory to those that read it."""

    session: str


@frozen
class Withdraw:
    """The engine is to be told that nothing of the session is read or written any more; it lives."""

    session: str


@frozen
class LeasesOver:
    """None is left."""

    session: str


@frozen
class StepOver:
    session: str
    step: Step
    done: bool


@frozen
class Close:
    """The daemon stops."""


@frozen
class Tick:
    """Time has passed."""


# ---- effects ----


@frozen
class Open:
    """There is a session from now on. before: the session whose memory it takes over."""

    session: str
    rank: Rank
    before: str | None


@frozen
class Attached:
    """All that was in the way has ended: the engine is told that it is attached."""

    session: str


@frozen
class Refused:
    session: str
    why: KvferryError


@frozen
class Detach:
    """The engine hears nothing any more; its transfers end."""

    session: str
    why: str


@frozen
class EndLeases:
    """Leases that must end with the engine. LeasesOver is said when none is left. keep_whole: not what is published
    whole, which may still be read."""

    session: str
    why: str
    keep_whole: bool


@frozen
class Shut:
    """Nothing more is begun in the session; what is being registered is given up."""

    session: str


@frozen
class Take:
    """A step of the session's end; StepOver says how it went. keep: free but what the daemon owns."""

    session: str
    step: Step
    why: str
    keep: bool


@frozen
class Hold:
    """Its memory may still be read or written: it stays, and is accounted for."""

    session: str


@frozen
class Ended:
    """The session has retired: nothing of it is read or written any more, unless it is stuck."""

    session: str
    stuck: bool


@frozen
class Over:
    """Nothing is left of the session."""

    session: str


SessionEvent: TypeAlias = (
    Attach | GiveUp | Introduced | Allocated | RegistrationBegun | RegistrationOver | StreamEnded | Died | Leave
    | Withdraw | LeasesOver | StepOver | Close | Tick
)  # fmt: skip
SessionEffect: TypeAlias = (
    Open | Attached | Refused | Detach | EndLeases | Shut | Take | Hold | Ended | Over
)  # fmt: skip
