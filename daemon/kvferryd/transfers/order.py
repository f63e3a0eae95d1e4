"""Orders and reservations: the two halves of a transfer, as values, and how they are read from requests."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from kvferry.errors import Malformed, first_breach, shorten
from kvferry.manifest import Group, Manifest
from kvferry.protocol.attempts import Attempt
from kvferry.protocol.claims import Blocks
from kvferry.schemas import DestinationBody, OrderBody, SourceBody
from kvferry.tables import BlockIds, BlockTable, Tables, tables_from_json
from kvferry.v1 import engine_pb2, peer_pb2
from kvferry.wire import tables_from_proto
from kvferryd.check import check_destination, check_number, check_seconds, check_way
from kvferryd.observe.logs import UNTRACED, Trace
from kvferryd.peers import allow
from kvferryd.plan.segments import local_tokens

MAX_BY = 64
"""Characters of a daemon's instance."""


@dataclass(frozen=True, slots=True)
class Order:
    """The source to read from.

    epoch: the source engine must be in it; empty for any. lease: the number of the one that is meant; 0 for any.
    deadline_s: seconds from acceptance; None for the daemon's default. way: auto, direct, staged or mapped; empty for
    the daemon's setting. ordered_s: what the deadline was when the order came to rank 0, which has handed it on.
    leader: the instance of rank 0's daemon then.
    """

    engine_id: str
    address: str
    epoch: str = ""
    lease: int = 0
    priority: int = 0
    deadline_s: float | None = None
    way: str = ""
    trace: Trace = field(default=UNTRACED, compare=False)
    ordered_s: float = field(default=0.0, compare=False)
    leader: str = field(default="", compare=False)

    @property
    def lease_id(self) -> tuple[str, int] | None:
        """(epoch, number) of the one lease that a rank with this order reads; None where it may be another."""
        return (self.epoch, self.lease) if self.epoch and self.lease else None

    def same_source(self, other: Order) -> bool:
        """Whether both read from one engine, in one epoch and one lease as far as they name them."""
        epochs, leases = {self.epoch, other.epoch} - {""}, {self.lease, other.lease} - {0}
        return self.engine_id == other.engine_id and max(len(epochs), len(leases)) <= 1

    def naming(self, other: Order) -> Order:
        """This order, of the epoch and the lease that the other one names, where it names none itself."""
        return replace(self, epoch=self.epoch or other.epoch, lease=self.lease or other.lease)

    @property
    def source(self) -> SourceBody:
        epoch, lease = self.epoch or None, self.lease or None
        return SourceBody(engine_id=self.engine_id, address=self.address, epoch=epoch, lease=lease)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The blocks to write on this rank. Raises KvferryError (`malformed_tables`) where `tokens` is not a range.

    tokens: global [first, last); None for all that is published. digest: what the lease must have been published with;
    empty is not checked. zero: what the tokens leave of the blocks is to be zero.
    """

    tables: Tables
    tokens: tuple[int, int] | None
    digest: bytes = b""
    zero: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None and not 0 <= self.tokens[0] <= self.tokens[1]:
            why, remedy = "the token range is not a range", "0 <= first <= last, global tokens, last exclusive"
            raise Malformed("malformed_tables", why, field="token_range", value=self.tokens, remedy=remedy)
        if self.zero and self.tokens is None:
            why, remedy = "what the tokens leave of the blocks can only be zeroed if they are named", "name the tokens"
            raise Malformed("malformed_tables", why, field="zero", value=True, remedy=remedy)

    def claimed(self, manifest: Manifest) -> Blocks:
        """The blocks that tokens are written to; the tables have been checked."""
        groups = {group.name: group for group in manifest.groups}
        return {name: self._claimed(groups[name], table) for name, table in self.tables.items()}

    def _claimed(self, group: Group, table: BlockTable) -> BlockIds:
        """Blocks of a table before the token range may be shared, for example a cached prefix."""
        if self.tokens is None or group.kind == "state":
            return table.block_ids
        start, stop = (max(0, local_tokens(group.token_shard, each) - table.first_token) for each in self.tokens)
        return table.block_ids[start // group.block_size : -(-stop // group.block_size)]

    def fingerprint(self) -> bytes:
        """Equal for equal reservations, and kept in place of block tables, which may be of megabytes."""
        said = hashlib.sha256(repr((self.tokens, self.digest, self.zero)).encode())
        for name, table in sorted(self.tables.items()):
            said.update(repr((name, table.first_token, len(table.block_ids))).encode())
            said.update(table.block_ids.tobytes())
        return said.digest()


def order_of(body: OrderBody, trace: Trace) -> Order:
    source, deadline_s = body.source, body.deadline_ms / 1e3 if body.deadline_ms else None
    epoch, lease, way = source.epoch or "", source.lease or 0, body.way or ""
    return Order(source.engine_id, source.address, epoch, lease, body.priority, deadline_s, way, trace)


def reservations_of(wanted: DestinationBody | None, world_size: int) -> dict[int, Reservation]:
    """The tables of an order by rank: given by rank, or one set for all. Empty where the engine reserves its blocks."""
    if wanted is None or wanted.tables is None:
        return {}
    given, ranks = wanted.tables, range(world_size)
    if given and all(
        key.isdigit() and isinstance(value, Mapping) and "block_ids" not in value for key, value in given.items()
    ):
        if missing := [rank for rank in ranks if str(rank) not in given]:
            why, remedy = f"ranks {missing} have no tables", "give tables for every rank, or one set for all"
            raise Malformed("malformed_tables", why, field="destination.tables", value=sorted(given), remedy=remedy)
        tables = {rank: tables_from_json(given[str(rank)], f"destination.tables.{rank}") for rank in ranks}
    else:
        tables = dict.fromkeys(ranks, tables_from_json(given, "destination.tables"))
    return {rank: Reservation(tables[rank], wanted.token_range) for rank in ranks}


def order_from_proto(
    request: engine_pb2.ReceiveRequest | peer_pb2.OrderRequest, allowed: tuple[str, ...], trace: Trace = UNTRACED
) -> Order:
    """Checked. Raises KvferryError."""
    source = request.source
    check_source(source, allowed)
    check_seconds("deadline_s", request.deadline_s)
    check_way(request.way)
    order = Order(
        source.engine_id, source.address, source.epoch, source.lease, request.priority, request.deadline_s or None,
        request.way, trace,
    )  # fmt: skip
    if isinstance(request, engine_pb2.ReceiveRequest):
        return order
    check_seconds("ordered_s", request.ordered_s)
    return replace(order, ordered_s=request.ordered_s, leader=shorten(request.leader, MAX_BY))


def check_source(source: engine_pb2.Source, allowed: tuple[str, ...]) -> None:
    """Raises KvferryError (`address_not_allowed`, `malformed_source`, `number_required`)."""
    allow.check(source.address, allowed)
    _check_source(source.engine_id, source.address, source.epoch)
    if source.lease:
        check_number("source.lease", source.lease)


@functools.lru_cache(maxsize=4096)  # every order asks, and there are few sources
def _check_source(engine_id: str, address: str, epoch: str) -> None:
    """Otherwise its record could not be told. Raises KvferryError (`malformed_source`)."""
    try:
        SourceBody.model_validate({"engine_id": engine_id, "address": address, "epoch": epoch or None})
    except ValidationError as error:
        raise first_breach(error, "source", "malformed_source", "name the engine as it has registered") from None


def reservation_from_proto(
    request: engine_pb2.ReceiveRequest | peer_pb2.OrderRequest, manifest: Manifest, digest: bytes = b""
) -> Reservation:
    """Checked against the cache of the engine. Raises KvferryError."""
    wanted = (request.tokens.start, request.tokens.stop) if request.HasField("tokens") else None
    zero = isinstance(request, engine_pb2.ReceiveRequest) and request.zero
    reserved = Reservation(tables_from_proto(request.tables), wanted, digest, zero)
    check_destination(manifest, reserved.tables, reserved.tokens)
    return reserved


def attempt_from_proto(attempt: peer_pb2.Attempt) -> Attempt:
    """Checked. Raises KvferryError (`number_required`)."""
    check_number("attempt", attempt.number)
    return Attempt(attempt.number, shorten(attempt.by, MAX_BY))


def attempt_to_proto(attempt: Attempt) -> peer_pb2.Attempt:
    return peer_pb2.Attempt(number=attempt.number, by=attempt.by)
