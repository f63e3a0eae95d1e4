"""All that a daemon keeps, and how much of it there may be: a row for each collection that its objects have.

`Kept` walks from the daemon's core and its peer service to every object of ours and adds up the collections of each
class and attribute, wherever they lie. A collection without a row is a violation: nobody adds one without saying how
far it may grow. Manifests, plans and settings are no part of it: they are as large as what was registered.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
from cachetools import Cache
from stepped import Daemon

from kvferry.protocol import leader, lease, leases, packing, parts, peers, readers, serving, session_events, sessions
from kvferry.protocol.transfer import Progress
from kvferryd import aio
from kvferryd.api import callers
from kvferryd.paths import move
from kvferryd.peers import peer, reader_stream
from kvferryd.staging import share
from kvferryd.transfers.transfer import Transfer

MAPPINGS = (dict, Cache, WeakKeyDictionary, WeakValueDictionary, types.MappingProxyType)
COLLECTIONS = (dict, list, set, deque, Cache, WeakKeyDictionary, WeakValueDictionary, WeakSet)
VALUES = ("kvferry.manifest", "kvferry.schemas", "kvferry.tables", "kvferry.v1", "kvferryd.config", "kvferryd.copy",
          "kvferryd.observe", "kvferryd.plan")  # fmt: skip
"""Modules whose objects are values, or are made once. Nothing is looked for in them."""


class Kept:
    """The sizes of a daemon's collections by class and attribute, and how many objects of each class it has."""

    def __init__(self, daemon: Daemon, others: int, *, whole: bool = True) -> None:
        """others: daemons beside it. whole: by a walk, which takes milliseconds; else transfers and leases alone."""
        self.others, self.engine, self.jobs, self.config = others, daemon.engine, daemon.ferry.jobs, daemon.ferry.config
        self.sizes: Counter[str] = Counter()
        self._objects: Counter[str] = Counter()
        # The rows of these speak of each other alone.
        few = self.jobs, self.jobs.requests.parts, self.jobs.requests._claims, daemon.engine.leases.source.leases
        for each in _reached(daemon.ferry, daemon.process.service) if whole else few:
            name = type(each).__name__
            self._objects[name] += 1
            if _is_collection(type(each)):
                self.sizes[name] += _size(each)
            for attribute, value in _attributes(each):
                if _is_collection(type(value)):
                    self.sizes[f"{name}.{attribute}"] += _size(value)
        self.sizes["words that are whole"] = int(np.count_nonzero(daemon.engine.leases.words._words))
        self.sizes["users of peers"] = sum(
            each.users for meeting in daemon.ferry.peers_known._of.values() for each in meeting.machine._loaded.values()
        )
        over = [each for each in self.jobs if each.over and each.quiet.is_set()]
        self.going_on = len(list(self.jobs)) - len(over)
        self.sizes["transfers over that hold more than a record"] = sum(map(_holds_more, over))

    def __call__(self, name: str) -> int:
        """Elements of a collection, in all objects that have one of this name."""
        return self.sizes[name]

    def of(self, name: str) -> int:
        """Objects of a class."""
        return self._objects[name]

    @property
    def ranks(self) -> int:
        """The most ranks that an engine here has."""
        return self.others + 1

    @property
    def slots(self) -> int:
        arena = self.engine.arena
        return 0 if arena is None else arena.span.nbytes // arena.slot_nbytes

    def too_many(self, *, at_rest: bool = False) -> Iterator[tuple[str, int, int]]:
        """(name, size, most) of what is more than it may be. at_rest: nothing is under way, and all is written down."""
        for name, size in self.sizes.items():
            if name in UNDER_WAY:
                most = 0 if at_rest else UNDER_WAY[name](self)
            elif name in REMEMBERED:
                most = REMEMBERED[name](self)
            else:
                name, most = f"{name}, which has no row in bounds.py", -1
            if size > most:
                yield name, size, most


Row = Callable[[Kept], int]
UNDER_WAY: dict[str, Row] = {
    # the reading side
    "Parts._waiting": lambda kept: kept.going_on,
    "Part.brought": lambda kept: kept.ranks * kept.going_on,
    "Transfers._after": lambda kept: 2 * kept("Transfers._by_id"),
    "transfers over that hold more than a record": lambda kept: 0,
    "users of peers": lambda kept: kept.going_on,
    "Ranks._led": lambda kept: kept.going_on,
    "_Led.brought": lambda kept: kept.ranks * kept("Ranks._led"),
    "_Led.calls": lambda kept: kept.ranks * kept("Ranks._led"),
    "Ranks._telling": lambda kept: kept("Leader._tells"),
    "Leader._led": lambda kept: kept.going_on,
    "_Led.ranks": lambda kept: kept.ranks * kept("Leader._led"),
    "Leader._tells": lambda kept: kept.ranks * (leader.TOLD_AGAIN + kept.going_on),
    "Claims._held": lambda kept: kept.going_on,
    "Claims._gone": lambda kept: kept("Claims._held"),
    "Reservation.blocks": lambda kept: kept.going_on,
    "_Claim.blocks": lambda kept: kept("Claims._held"),
    "Reservation.tables": lambda kept: kept.going_on,
    "Work._flights": lambda kept: 64 * kept.going_on,
    "Work._readers": lambda kept: kept.ranks * kept("Transfers._by_id"),
    "Work._arisen": lambda kept: 0,
    "Progress.readings": lambda kept: kept.ranks * kept.going_on,
    "Progress._awaited": lambda kept: kept.ranks * kept.going_on,
    "Met.read": lambda kept: 0,
    "Seen.tables": lambda kept: 2 * kept("Progress.readings"),  # the one that it goes by, and one that it was just told
    "ChunkStream._pairing": lambda kept: kept.of("ChunkStream"),
    "ChunkStream.chunks": lambda kept: 16 * kept.of("ChunkStream"),
    "ChunkStream._packed": lambda kept: kept("ChunkStream.chunks"),
    "ChunkStream._wanted_at": lambda kept: kept("ChunkStream.chunks"),
    "Read.chunks": lambda kept: 64 * kept.going_on,
    "Read.in_flight": lambda kept: 64 * kept.going_on,
    "ReaderStream._listeners": lambda kept: kept.ranks * kept.going_on,
    "Notes._notes": lambda kept: aio.NOTES,
    # the source's side
    "Leases._live": lambda kept: kept.config.max_leases,
    "Leases._opened": lambda kept: 2 * kept.others * kept.config.max_leases,
    "Leases._fences": lambda kept: lease.MAX_FENCED * kept("Leases._live"),
    "Leases._arisen": lambda kept: 0,
    "words that are whole": lambda kept: kept("Leases._live"),
    "Words._at": lambda kept: kept("Leases._live"),
    "Waits._requests": lambda kept: kept.config.max_leases,
    "Waits._request_of": lambda kept: 2 * kept.others * kept("Waits._requests"),
    "Waits._at": lambda kept: kept("Waits._request_of"),
    "Alarms._at": lambda kept: (
        kept("Leases._live") + kept("Askings._at") + kept("Leader._led") + kept("Wanted._had")
    ),
    "Alarms._heap": lambda kept: 2 * kept("Alarms._at") + 64 * kept.of("Alarms"),
    "Lease.queued": lambda kept: lease.MAX_FENCED * kept("Leases._live"),
    "Publication.tables": lambda kept: kept("Leases._live"),
    "Readers._places": lambda kept: 2 * kept.others * kept("Leases._live"),
    "Readers._read": lambda kept: kept("Readers._places"),
    "Serving._opened": lambda kept: 2 * kept.config.max_leases * kept.of("Serving"),
    "Serving._announced": lambda kept: serving.ANNOUNCEMENTS * kept.of("Serving"),
    "ServedStream._packers": lambda kept: kept.of("Packing"),
    "Packer._chunks": lambda kept: 16 * kept.of("Packing"),
    "Packer._asked": lambda kept: packing.GATHERS * kept.of("Packing"),
    "Packer._copies": lambda kept: packing.GATHERS * kept.of("Packing"),
    "Packer._held": lambda kept: kept.slots,
    "Packing._begun": lambda kept: 16 * kept.of("Packing"),
    "Packing._wanted": lambda kept: packing.UNREAD * kept.of("Packing"),
    "Packing._gathering": lambda kept: packing.GATHERS * kept.of("Packing"),
    "Packing._untold": lambda kept: kept("Packer._held"),
    "Packing._held": lambda kept: kept("Packer._held"),
    "Arena._kept": lambda kept: kept.slots,
    "Arena._waiting": lambda kept: kept("Packer._asked") + kept.slots * kept.going_on,
    # peers, calls, sessions
    "Askings._at": lambda kept: 2 * kept.others,
    "Askings._by_number": lambda kept: kept("Askings._at"),
    "Askings._of": lambda kept: kept.going_on + kept("Transfers._after"),
    "Asking.waiting": lambda kept: kept("Askings._of"),
    "Meeting._answers": lambda kept: kept("Askings._of"),
    "Meeting._shaking": lambda kept: 2 * kept.others,
    "Meeting._under_way": lambda kept: 2 * kept.others,
    "Meeting._unloading": lambda kept: 2 * kept.others,
    "Channels._closing": lambda kept: 2 * kept.others,
    "Peers._preparing": lambda kept: 2 * kept.others,
    "Pairings._making": lambda kept: kept.others,
    "MappedMemory.regions": lambda kept: 0,
    "Outbox._waiting": lambda kept: 256 * kept.of("Outbox"),
    "Callers._ended": lambda kept: kept("Callers._under_way"),
    "Callers._turns": lambda kept: kept("Callers._under_way"),
    "Engines._steps": lambda kept: 1,
    "Engines._arisen": lambda kept: 0,
    "Engines._attaching": lambda kept: 1,
    "Sessions._attaching": lambda kept: 1,
    "Session.left": lambda kept: len(session_events.Step),
    "Session._given": lambda kept: len(kept.engine.manifest.regions) + 1,
    "Tasks": lambda kept: sum(size for name, size in kept.sizes.items() if name.endswith(TASKS)),
    "Wanted._asked": lambda kept: kept("Wanted._had"),
    "Meeting._naming": lambda kept: kept("Wanted._asked"),
    # These worlds have no rosters, keepers, known peers or engines that hand files over.
    **dict.fromkeys(
        ("KnownPeers._looking", "KnownPeers._lookups", "KnownPeers._resolved", "Wanted._named", "Wanted._awaited",
         "_Readers.awaited", "Roster._challenges", "Roster._places", "Rosters._rosters", "Rosters._of", "Seed._told"),
        lambda kept: 0,
    ),
}  # fmt: skip
"""Collections of what is under way: nothing is left in them when nothing is."""
OF_SEVERAL_RANKS = {"_Led.brought", "_Led.calls", "_Led.ranks"}
"""Rows of engines of several ranks alone, as the worlds of seeded.py have."""
TASKS = (
    "._after",
    "._tasks",
    "._telling",
    "_Led.calls",
    "._preparing",
    "._shaking",
    "._naming",
    "._unloading",
    "._steps",
    "._closing",
    "._lookups",
    "._pairing",
)
REMEMBERED: dict[str, Row] = {
    # Ranks that ask rank 0 which lease it reads wait there by the deadline of the call.
    "Transfers._awaited": lambda kept: kept.ranks * kept.config.max_transfers,
    # the reading side
    "Transfers._by_id": lambda kept: kept.config.max_transfers + kept.config.history,
    "Progress._whole": lambda kept: kept.ranks * kept("Transfers._by_id"),
    "Pass.read": lambda kept: kept.ranks * kept("Transfers._by_id"),
    "Pass.unpacked": lambda kept: kept.ranks * kept("Transfers._by_id"),
    "Met.others": lambda kept: kept.ranks * kept("Transfers._by_id"),
    "Transfers._by_request": lambda kept: kept("Transfers._by_id"),
    "Transfers._by_part": lambda kept: kept("Transfers._by_id"),
    "Transfers._ranks_of": lambda kept: 1,
    "Transfers._engines": lambda kept: 1,
    "Ranks._engines": lambda kept: 1,
    "Parts._by_number": lambda kept: kept("Transfers._by_id"),
    "Parts._current": lambda kept: kept("Transfers._by_id"),
    "Parts._ended": lambda kept: kept("Transfers._by_id"),
    "Transfer.ranks": lambda kept: kept.ranks * kept("Transfers._by_id"),
    "Course.ms": lambda kept: 16 * kept("Transfers._by_id"),
    "Claims._holders": lambda kept: len(kept.engine.manifest.groups),
    "Ranks._open": lambda kept: kept.ranks,
    # the source's side
    "Latest._values": lambda kept: (
        4 * leases.TOMBSTONES
        + readers.MAX_READERS * kept("Leases._live")
        + 2 * parts.ATTEMPTS
        + 3 * kept.others
        + sessions.EPOCHS
    ),
    "Source.streams": lambda kept: 2 * kept.others,
    "Leases.streams": lambda kept: kept("Source.streams"),
    "Leases._streams": lambda kept: 2 * kept.others,
    "Leases._audience": lambda kept: 2 * kept.others,
    "Words._free": lambda kept: kept.config.max_leases,
    "Gatherer.regions": lambda kept: kept.of("Gatherer"),
    "Pairings._known": lambda kept: share.PAIRINGS,
    "Arena._free": lambda kept: kept.slots,
    "Arena._lent": lambda kept: 2,
    # peers, calls, sessions
    "Peers._known": lambda kept: kept.others,
    "Peers._loaded": lambda kept: kept.others + kept("users of peers"),
    "Peers._of": lambda kept: 1,
    "Meeting._met": lambda kept: kept("Peers._loaded"),
    "Wanted._had": lambda kept: kept.others,
    "Wanted._met": lambda kept: kept("Wanted._had"),
    "Wanted._failed": lambda kept: kept("Wanted._had"),
    "Inbound._of": lambda kept: 1,
    "_Readers.streams": lambda kept: kept("Source.streams"),
    "_Readers.left": lambda kept: 2 * kept.others,
    "Introductions._layouts": lambda kept: kept.of("PeerRank") + kept.others,
    "Peer.addresses": lambda kept: (kept.ranks + peers.NAMES) * kept.of("PeerEngine"),
    "PeerEngine.loaded": lambda kept: kept.ranks * kept.of("PeerEngine"),
    "PeerEngine.ranks": lambda kept: kept.ranks * kept.of("PeerEngine"),
    "PeerEngine.took_s": lambda kept: 16 * kept.of("PeerEngine"),
    "Waits._kept": lambda kept: move.MOST * kept.of("Waits"),
    "Figures.phases": lambda kept: peer.LATELY * kept.of("Figures"),
    "Figures.worst": lambda kept: peer.MINUTES * kept.of("Figures"),
    "Figures.lately": lambda kept: peer.LATELY * kept.of("Figures"),
    "PeerRank.regions": lambda kept: kept.of("PeerRank"),
    "ReaderStream._announced": lambda kept: (
        reader_stream.ANNOUNCED_NBYTES // reader_stream.LEAST_NBYTES * kept.of("ReaderStream")
    ),
    "Channels._contacts": lambda kept: kept.others,
    "Channels._open": lambda kept: 2 * kept.others,
    "Channels._newest": lambda kept: kept("Channels._open"),
    "Callers._under_way": lambda kept: callers.MAX_CALLS,
    "Callers._from": lambda kept: kept("Callers._under_way"),
    "Membership.members": lambda kept: kept.ranks,
    "Membership.gone": lambda kept: kept.ranks,
    "Engines._sessions": lambda kept: 1,
    "Sessions.sessions": lambda kept: 1,
    "Sessions._current": lambda kept: 1,
    "Session.failed": lambda kept: len(session_events.Step),
    "Session.late": lambda kept: len(session_events.Step),
    "Unfreed._held": lambda kept: 1 + len(kept.engine.manifest.regions),  # the arena too
    "Session.regions": lambda kept: len(kept.engine.manifest.regions),
}
"""Collections that outlast what is under way, each with a bound of its own."""


def _holds_more(transfer: Transfer) -> bool:
    return transfer.work is not None or isinstance(transfer.read, Progress)


def _size(each: Any) -> int:
    """Its elements; of collections inside it, theirs."""
    if not each:
        return 0
    inside = list(each.values()) if isinstance(each, MAPPINGS) else ()
    return max(len(each), sum(len(value) for value in inside if _is_collection(type(value))))


@functools.cache
def _is_collection(kind: type) -> bool:
    return issubclass(kind, COLLECTIONS)


@functools.cache
def _looked_into(kind: type) -> bool:
    if kind in (types.MethodType, functools.partial) or issubclass(kind, (*MAPPINGS, *COLLECTIONS, tuple, frozenset)):
        return True
    return kind.__module__.startswith(("kvferry.", "kvferryd.")) and not kind.__module__.startswith(VALUES)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    each = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    return tuple(name for names in each for name in ((names,) if isinstance(names, str) else names))


def _attributes(each: object) -> list[tuple[str, Any]]:
    slots = [(name, getattr(each, name)) for name in _slots(type(each)) if hasattr(each, name)]
    held = list(getattr(each, "__dict__", {}).items())
    return held + slots if slots else held


def _reached(*roots: object) -> Iterator[Any]:
    """Every object of ours that these lead to."""
    seen, left = {id(root): root for root in roots}, list(roots)
    while left:
        each = left.pop()
        if isinstance(each, types.MethodType):
            inside = [each.__self__]
        elif isinstance(each, functools.partial):
            inside = [each.func, *each.args, *each.keywords.values()]
        else:
            inside = []
            if isinstance(each, MAPPINGS):
                inside += [*each.keys(), *each.values()]
            elif isinstance(each, (*COLLECTIONS, tuple, frozenset)):
                inside += each
            if type(each).__module__.startswith(("kvferry.", "kvferryd.")):
                yield each
                inside += [value for _, value in _attributes(each)]
        for value in inside:
            if id(value) not in seen and _looked_into(type(value)):
                seen[id(value)] = value
                left.append(value)
