"""All that the machine of peers is told, and all that it says: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError

Asker: TypeAlias = "int | str"
"""A caller's number; or an address that the settings name, for which nobody waits."""


class Home(NamedTuple):
    """The place of an engine in one epoch, which tells it from another engine of the same id. addresses: of its ranks'
    daemons, as its roster has them."""

    epoch: str
    addresses: tuple[str, ...]


# ---- from those who want a peer ----


@dataclass(frozen=True, slots=True)
class Get:
    """The caller wants the engine that is at this address. epoch: in which it must be; empty for any. ordered: an order
    names the address."""

    asker: Asker
    engine_id: str
    address: str
    epoch: str = ""
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask the peer anew: by what proves us now. The peer is forgotten where that fails."""

    asker: int
    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller waits no longer."""

    asker: int


@dataclass(frozen=True, slots=True)
class Use:
    """A transfer reads from the peer from now on. The peer stays loaded until all have left."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    number: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The peer is stale, or is to be forgotten."""

    number: int


@dataclass(frozen=True, slots=True)
class Unbind:
    """The next that answers to this engine id is its owner."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class Want:
    """The addresses that the settings name now: whatever engine is there is to be known. To be said again and again."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shut:
    """Our engine ends: nobody is asked any more, and nothing is read."""

    why: KvferryError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# ---- from those who are asked ----


@dataclass(frozen=True, slots=True)
class Met:
    """The handshake of this number has ended well."""

    number: int
    home: Home


@dataclass(frozen=True, slots=True)
class Unmet:
    """The handshake of this number has failed, and has unloaded all that it had loaded."""

    number: int
    why: KvferryError


@dataclass(frozen=True, slots=True)
class Over:
    """No daemon there holds the engine any more."""

    engine_id: str
    home: Home


@dataclass(frozen=True, slots=True)
class Lost:
    """A daemon of the peer has gone, or knows our engine by a roster that is over. Transfers that use it go on."""

    number: int


@dataclass(frozen=True, slots=True)
class Named:
    """The daemon at an address that the settings name serves this engine. at: where that is to be asked."""

    address: str
    engine_id: str
    at: str


@dataclass(frozen=True, slots=True)
class Unnamed:
    """It does not say."""

    address: str
    why: KvferryError


# ---- to the shell ----


@dataclass(frozen=True, slots=True)
class Shake:
    """Begin the handshake of this number."""

    number: int
    engine_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Cut the handshake off, and unload what it has loaded. Nothing is heard of it any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep all that the handshake has made: that is the peer from now on."""

    number: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload the peer: no transfer reads from it, now or later."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """As Unload, where our engine's agent is closed: that unloads all."""

    number: int


@dataclass(frozen=True, slots=True)
class Shaken:
    """The handshake is over. why: what came of it, where the peer is not kept."""

    number: int
    why: KvferryError | None = None


@dataclass(frozen=True, slots=True)
class Found:
    asker: Asker
    number: int


@dataclass(frozen=True, slots=True)
class Refused:
    asker: Asker
    why: KvferryError


@dataclass(frozen=True, slots=True)
class Name:
    """Ask the daemon at this address which engine it serves: `Named` or `Unnamed` is to come."""

    address: str


@dataclass(frozen=True, slots=True)
class Missing:
    """An address that the settings name cannot be met. Said when the reason is another than before."""

    address: str
    why: KvferryError


PeersEvent: TypeAlias = (
    Get
    | Renew
    | GiveUp
    | Use
    | Leave
    | Forget
    | Unbind
    | Want
    | Shut
    | Tick
    | Met
    | Unmet
    | Over
    | Lost
    | Named
    | Unnamed
)
PeersEffect: TypeAlias = Shake | Stop | Keep | Unload | Close | Shaken | Found | Refused | Name | Missing
