"""All that the machine of peers is told, and all that it says: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError

Place: TypeAlias = "tuple[str, str]"
"""An engine id, and the address at which it is asked. The id is empty where whatever engine is there is meant."""
Asker: TypeAlias = "int | Place"
"""A caller's number; or a place that is to be met, for which nobody waits."""


class Home(NamedTuple):
    """The place of an engine in one epoch, which tells it from another engine of the same id. addresses: of its ranks'
    daemons, as its roster has them."""

    epoch: str
    addresses: tuple[str, ...]


# ---- from those who want a peer ----


class Get(NamedTuple):
    """The caller wants the engine that is at this address. epoch: in which it must be; empty for any. ordered: an order
    names the address."""

    asker: Asker
    engine_id: str
    address: str
    epoch: str = ""
    ordered: bool = True


class Renew(NamedTuple):
    """Ask the peer anew: by what proves us now. The peer is forgotten where that fails."""

    asker: int
    number: int


class GiveUp(NamedTuple):
    """The caller waits no longer."""

    asker: int


class Use(NamedTuple):
    """A transfer reads from the peer from now on. The peer stays loaded until all have left."""

    number: int


class Leave(NamedTuple):
    number: int


class Forget(NamedTuple):
    """The peer is stale, or is to be forgotten."""

    number: int


class Unbind(NamedTuple):
    """The next that answers to this engine id is its owner."""

    engine_id: str


class Want(NamedTuple):
    """The addresses that the settings name now: whatever engine is there is to be known. To be said again and again."""

    addresses: tuple[str, ...]


class Had(NamedTuple):
    """The daemon before this one had met these engines: they are to be known again."""

    places: tuple[Place, ...]


class Shut(NamedTuple):
    """Our engine ends: nobody is asked any more, and nothing is read."""

    why: KvferryError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# ---- from those who are asked ----


class Met(NamedTuple):
    """The handshake of this number has ended well."""

    number: int
    home: Home


class Unmet(NamedTuple):
    """The handshake of this number has failed, and has unloaded all that it had loaded."""

    number: int
    why: KvferryError


class Over(NamedTuple):
    """No daemon there holds the engine any more."""

    engine_id: str
    home: Home


class Lost(NamedTuple):
    """A daemon of the peer has gone, or knows our engine by a roster that is over. Transfers that use it go on."""

    number: int


class Named(NamedTuple):
    """The daemon at a place that is to be met serves this engine. at: where that is to be asked."""

    place: Place
    engine_id: str
    at: str


class Unnamed(NamedTuple):
    """It does not say."""

    place: Place
    why: KvferryError


# ---- to the shell ----


class Shake(NamedTuple):
    """Begin the handshake of this number."""

    number: int
    engine_id: str
    address: str


class Stop(NamedTuple):
    """Cut the handshake off, and unload what it has loaded. Nothing is heard of it any more."""

    number: int


class Keep(NamedTuple):
    """Keep all that the handshake has made: that is the peer from now on."""

    number: int


class Unload(NamedTuple):
    """Unload the peer: no transfer reads from it, now or later."""

    number: int


class Close(NamedTuple):
    """As Unload, where our engine's agent is closed: that unloads all."""

    number: int


class Shaken(NamedTuple):
    """The handshake is over. why: what came of it, where the peer is not kept."""

    number: int
    why: KvferryError | None = None


class Found(NamedTuple):
    asker: Asker
    number: int


class Refused(NamedTuple):
    asker: Asker
    why: KvferryError


class Name(NamedTuple):
    """Ask the daemon at this place which engine it serves: `Named` or `Unnamed` is to come."""

    place: Place


class Missing(NamedTuple):
    """A place cannot be met. Said when the reason is another than before."""

    place: Place
    why: KvferryError


PeersEvent: TypeAlias = (
    Get | Renew | GiveUp | Use | Leave | Forget | Unbind | Want | Had | Shut | Tick
    | Met | Unmet | Over | Lost | Named | Unnamed
)  # fmt: skip
PeersEffect: TypeAlias = Shake | Stop | Keep | Unload | Close | Shaken | Found | Refused | Name | Missing
