"""The REST bodies, shared by the daemon that answers and the client that asks.

Times are milliseconds where the name ends in `_ms`, sizes are bytes. Unknown fields of a request are refused
with their name; unknown fields of an answer are ignored, so that an old client reads a new daemon.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from kvferry.checked import Checked
from kvferry.errors import KvferryError, Malformed, first_breach
from kvferry.protocol.states import LeaseState as LeaseState
from kvferry.protocol.states import TransferState as TransferState


def _number(given: object) -> object:
    if isinstance(given, bool | str):  # pydantic takes true for 1, and "1" too
        raise ValueError("it is not a number")
    return given


Number = BeforeValidator(_number)
"""Behind a field's bounds: pydantic writes those that come after it into /openapi.json under names of its own."""
MAX_REQUEST_ID = 256
MAX_METADATA = 64 << 10
"""Bytes beside a lease's KV."""
MAX_NUMBER = 1 << 53
"""Above the numbers of leases: JSON's readers keep integers below it whole."""
Token = Annotated[int, Field(ge=0, lt=MAX_NUMBER), Number]
Span = tuple[Token, Token]
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_REQUEST_ID)]
Address = Annotated[str, StringConstraints(pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:/]+):\d{1,5}$", max_length=300)]
ADDRESS_REMEDY = "write host:port, with brackets round an IPv6 address"


class Awaited(enum.StrEnum):
    """The reason why nothing of a transfer moves."""

    ORDER = "order"
    """The router's order; an engine's own, where it names the source."""
    RESERVATION = "reservation"
    """The blocks of the engine that receives."""
    HANDSHAKE = "handshake"
    LEASE = "lease"
    """The source daemon's answer, whether the request is published."""
    PUBLISH = "publish"
    """The source engine: its daemon answers, and has nothing (more) of the request."""
    FENCE = "fence"
    """The source engine: it had published, and its fence was not reached. It is `publish` until it is over."""
    SLOT = "slot"
    """A slot of the own daemon's staging arena, while the transfer has none."""
    PACK = "pack"
    """The source's daemon, which packs what is staged: for a slot of its own, or its copies."""
    RANK = "rank"
    """Another rank of the same engine: rank 0, which says which lease it has read."""


Way: TypeAlias = Literal["auto", "direct", "staged", "mapped"]


class _Request(Checked):
    """A fault in a body that Python makes is a KvferryError (`malformed_request`), as a daemon answers."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def _fault(cls, error: ValidationError) -> Malformed:
        first, name = error.errors(include_url=False)[0], cls.__name__
        field, remedy = ".".join([name, *map(str, first["loc"])]), "see the fields of its class, or /openapi.json"
        if first["type"] == "string_pattern_mismatch" and field.endswith("address"):
            why = f"{field} is not host:port"
            return Malformed("malformed_request", why, field=field, value=first["input"], remedy=ADDRESS_REMEDY)
        return first_breach(error, name, "malformed_request", remedy)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RefusalBody(_Answer):
    code: str
    component: str
    source: str
    destination: str


class Problem(_Answer):
    """RFC 9457 problem+json. `code` is stable; `field`, `value` and `remedy` say what to change."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    field: str = ""
    value: str = ""
    remedy: str = ""
    refusals: list[RefusalBody] = []


class SourceBody(_Request):
    """`address`: host:port of the peer service of any rank's daemon. `epoch`: refuse any other start of the engine.
    `lease`: the number of the lease that is meant, waited for until it is published; refuse any other. Without one all
    ranks read the lease that is there, and fail (`lease_changed`) where it is not the same for all."""

    engine_id: RequestId
    address: Address
    epoch: Annotated[str, StringConstraints(max_length=256)] | None = None
    lease: Annotated[int, Field(ge=1, lt=MAX_NUMBER), Number] | None = None


class DestinationBody(_Request):
    """Which engine receives, and where to write when it does not reserve blocks itself.

    `engine_id`: needed where the daemon serves several. `tables`: by group, the same on every rank, or by rank and then
    group. `token_range`: [first, last) global tokens.
    """

    engine_id: RequestId | None = None
    tables: dict[str, Any] | None = None
    token_range: Span | None = None


class OrderBody(_Request):
    """`priority`: higher goes first. `deadline_ms`: from acceptance; the daemon's default where absent. `way`: how to
    move this one; as the daemon is configured where absent. `attempt`: as the reading engine numbers it, for which the
    order waits; without one it belongs to the attempt under way, or else to the next. `order_id`: the caller's own name
    of the order; when it comes again the answer is the same, whatever has ended, or `order_conflict` once the record is
    forgotten.

    `destination.engine_id` (or the daemon's only engine) says which engine receives.
    """

    request_id: RequestId
    source: SourceBody
    destination: DestinationBody | None = None
    priority: Annotated[int, Field(ge=-100, le=100), Number] = 0
    deadline_ms: Annotated[int, Field(ge=1, le=3_600_000), Number] | None = None
    way: Way | None = None
    attempt: Annotated[int, Field(ge=1, lt=2**31), Number] | None = None
    order_id: RequestId | None = None


class Ordered(_Answer):
    transfer_id: str
    state: TransferState


class ErrorBody(_Answer):
    code: str
    message: str
    field: str = ""
    value: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, error: KvferryError) -> ErrorBody:
        return cls(
            code=error.code, message=error.message, field=error.field, value=error.value, remedy=error.remedy
        )  # fmt: skip


class Wait(_Answer):
    """A wait for one thing; where it was waited for several times, all of them together.

    on: the thing: the address of a source's daemon, an engine, `rank N`, an arena; "router". part: of a handshake the
    step that took the longest, such as `asking`, `screening`, `loading`, `mapping`, `planning`. began_at: of the first
    time, seconds since 1970.
    """

    what: Awaited
    on: str = ""
    part: str = ""
    began_at: float = 0.0
    ms: float = 0.0


class RankTransfer(_Answer):
    """A rank's share of a transfer.

    bytes_per_s: while bytes moved. took_ms: from the order until the daemon that is asked learned of its end; None
    while it goes on. phases_ms: the time in each state, and `total`. `waiting` is the sum of `waiting_order`,
    `waiting_reservation` and `waiting_publish`; the last counts here in whatever state it was waited. `moving`: the
    part of `reading` in which bytes moved; `nixl`: what NIXL took of that. A phase is counted at its end. waits: what
    was waited for while nothing moved, for a millisecond or more, the longest first, 8 at most; each at its end.
    """

    rank: int
    state: TransferState
    bytes: int = 0
    descriptors: int = 0
    path: str = ""
    transport: str = ""
    phases_ms: dict[str, float] = {}
    bytes_per_s: float = 0.0
    took_ms: float | None = None
    waits_for: Awaited | None = None
    waits: list[Wait] = []
    error: ErrorBody | None = None


class TransferRecord(_Answer):
    """A transfer as the daemon that took the order sees it: all ranks of its engine together.

    bytes and descriptors: sums over ranks. path: direct, staged or mapped. transport: what NIXL used, for example
    "UCX"; or "cuda_ipc", a copy of the reader's from memory that is mapped there: the source's cache, or its slots.
    took_ms, phases_ms, bytes_per_s, waits_for: those of `slowest_rank`, which decides when the request can go on (see
    RankTransfer). tokens: the global range moved. lease: the number of the one that is read, once known. attempt: its
    number; 0 while the order waits for the reservation that says it. created_at, ended_at: seconds since 1970.
    waited_longest: the longest wait of the slowest rank, or for that rank; why_slow: the same in a sentence, with what
    helps.
    """

    transfer_id: str
    request_id: str
    engine_id: str
    source: SourceBody | None = None
    state: TransferState
    bytes: int = 0
    descriptors: int = 0
    path: str = ""
    transport: str = ""
    tokens: tuple[int, int] | None = None
    attempt: int = 1
    lease: int | None = None
    slowest_rank: int = 0
    took_ms: float | None = None
    phases_ms: dict[str, float] = {}
    bytes_per_s: float = 0.0
    waits_for: Awaited | None = None
    waited_longest: Wait | None = None
    why_slow: str = ""
    ranks: list[RankTransfer] = []
    error: ErrorBody | None = None
    created_at: float = 0.0
    ended_at: float | None = None


class TransferList(_Answer):
    """cursor: give it back as `since`, and the next answer has only what may have changed: transfers under way, and
    those that have ended since. whole: no `since` was given, or that of a daemon before this one: forget what you have.
    now: by the daemon's clock, as the times of its records are, seconds since 1970.
    """

    transfers: list[TransferRecord]
    cursor: str = ""
    whole: bool = True
    now: float = 0.0


class LeaseReader(_Answer):
    """A rank that reads a lease, or has read it.

    state: `reading`; `read`, it has all that it wanted; `left`, it has gone without, or its engine reads all anew in a
    later attempt. bytes: what it has read, as it says when it closes the lease. attempt: the number of its engine's;
    where orders bring their tables the one by which rank 0 counts those. Times are by the source's clock from the first
    publish on, None where that was not, or is not yet: opened_ms, when it had the lease open, 0 where it had waited for
    it; packed_ms, when all was packed of what is staged; closed_ms, when it said that it needs no more.
    """

    engine_id: str
    epoch: str = ""
    rank: int
    world_size: int = 1
    state: str = "reading"
    bytes: int = 0
    attempt: int = 0
    opened_ms: float | None = None
    packed_ms: float | None = None
    closed_ms: float | None = None


class LeaseRecord(_Answer):
    """lease: its number. age_ms: from the first publish until now or its end. shown_ms: from then until readers saw the
    last publish, its fence reached; None before. reason: why it ended, if it was not read.
    bytes: of all readers. readers: of a lease that has ended, the first 32."""

    request_id: str
    lease: int = 0
    engine_id: str
    epoch: str
    state: LeaseState
    num_tokens: int
    readers_expected: int
    readers_open: int
    readers_closed: int
    expires_in_ms: float | None = None
    """None while a reader is live: a lease with a live reader does not expire."""
    created_at: float = 0.0
    ended_at: float | None = None
    age_ms: float = 0.0
    shown_ms: float | None = None
    reason: str = ""
    bytes: int = 0
    readers: list[LeaseReader] = []
    weights: str = ""
    """Their name; empty for those that the engine registered with."""


class LeaseList(_Answer):
    """total: of leases that are held, listed or not."""

    leases: list[LeaseRecord]
    total: int = 0


class SourceRank(_Answer):
    """The lease that a transfer reads, as one rank of its source knows it; or why it does not say. Times in `lease` are
    by its own clock; of its readers there are the ranks of the engine that reads."""

    rank: int
    address: str
    lease: LeaseRecord | None = None
    error: ErrorBody | None = None


class SourceHalf(_Answer):
    """The source's half of a transfer, as its daemons tell it now. why: why they are not asked; then there are no
    `ranks`."""

    ranks: list[SourceRank] = []
    why: str = ""


class PeerRequest(_Request):
    """Prewarm: shake hands now with every rank of this engine, on behalf of `destination` (or the only engine)."""

    engine_id: RequestId
    address: Address
    destination: RequestId | None = None


class PeerState(enum.StrEnum):
    CONNECTED = "connected"
    """Its stream of leases is open: gRPC asks every 10 s whether it lives, and ends the stream 10 s later."""
    IDLE = "idle"
    """A handshake is done, and no stream is open."""
    FAILING = "failing"
    """It has not answered since `last_error_at`; with no `failures` it answers, and NIXL does not reach its memory."""


class PhaseTimes(_Answer):
    """p99_ms: all but one in a hundred of the last 100 transfers took no longer. worst_ms: of the last five minutes."""

    p99_ms: float
    worst_ms: float = 0.0


class PeerRecord(_Answer):
    """A rank of an engine elsewhere.

    failures: in a row, without an answer in between. last_contact_at: when it last answered a call, or a transfer from
    it was done; seconds since 1970. p50_ms, p99_ms: half of its last 100 transfers, all but one in a hundred, took no
    longer, without waits for order, reservation and publish. bytes_per_s: the median of their rates while bytes moved,
    of what this rank sent. path: of the last one. phases: times of transfers from it, failed ones too, by phase: waits
    for its `handshake`, its `lease` (the answer to an opening), its `publish`, its `fence`, and its `pack`; `moving`;
    `verifying`.
    """

    engine_id: str
    rank: int
    address: str
    epoch: str
    protocol: int
    version: str
    agent: str
    rest: str = ""
    """The URL of its daemon's REST service, if it shares that and this daemon's host can reach it."""
    ways: dict[str, str] = {}
    """Every way of moving: empty when the pair can take it, otherwise why not. `mapped slots` where NIXL reads the
    slots of `staged`: why these could not be mapped."""
    bytes_read: int = 0
    transfers: int = 0
    state: PeerState = PeerState.IDLE
    last_contact_at: float | None = None
    last_error: ErrorBody | None = None
    last_error_at: float | None = None
    failures: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    bytes_per_s: float | None = None
    path: str = ""
    phases: dict[str, PhaseTimes] = {}


class InboundRecord(_Answer):
    """A rank of another engine that is connected to read leases of one of ours.

    since: when it connected, seconds since 1970. reading: leases that it has open now. leases, bytes: what it has read
    in this connection, by its own word.
    """

    source: str
    """Our engine that it reads."""
    engine_id: str
    epoch: str
    rank: int
    world_size: int
    address: str
    since: float
    reading: int = 0
    leases: int = 0
    bytes: int = 0


class UnmetRecord(_Answer):
    """A daemon that was called in the last ten minutes, does not answer or cannot be read (`failures` is 0 then), and
    is none of `peers` and `lost`. Fields as of PeerRecord. engine_id, rank: of another rank of an engine here, which is
    known by its roster; empty and None for a daemon that was never met."""

    engine_id: str = ""
    rank: int | None = None
    address: str
    failures: int
    last_error: ErrorBody
    last_error_at: float
    last_contact_at: float | None = None


class FailedRequest(_Answer):
    """A request that failed. at: seconds since 1970. transfer_id: empty where what failed is a lease here that nobody
    has read. engine_id: the engine that was read."""

    at: float
    request_id: str
    transfer_id: str = ""
    engine_id: str
    error: ErrorBody

    @classmethod
    def of(cls, record: TransferRecord, error: ErrorBody) -> FailedRequest:
        """error: of the record, or of one of its ranks."""
        source = record.source.engine_id if record.source else ""
        at = record.ended_at or record.created_at
        return cls(
            at=at, request_id=record.request_id, transfer_id=record.transfer_id, engine_id=source, error=error
        )  # fmt: skip


class PeerList(_Answer):
    """lost: forgotten, since they did not answer; the next order shakes hands with them anew. unmet: called, and no
    handshake was ever done, other ranks of the engines here among them, the newest 64. failed: the last
    request that failed to read from each engine in 24 hours, those of daemons before this one among them; the newest
    first, 64 at most."""

    peers: list[PeerRecord]
    lost: list[PeerRecord] = []
    unmet: list[UnmetRecord] = []
    inbound: list[InboundRecord] = []
    failed: list[FailedRequest] = []


class EngineRecord(_Answer):
    """A rank of an engine beside this daemon. cache_bytes: of the memory that it has handed over or was given.
    arena_bytes: of its staging arena; 0 until one is needed."""

    engine_id: str
    epoch: str
    rank: int
    world_size: int
    attached: bool
    members: dict[int, str] = {}
    """Peer address by rank, as far as known."""
    rest: dict[int, str] = {}
    """The URL of REST by rank, of an engine of several ranks: of those that this daemon's host can reach."""
    gone: dict[int, str] = {}
    """The address of each rank that has left, and until when it was there, in words."""
    notes: list[str] = []
    weights: str = ""
    """The name of those that took the place of the ones that it registered with; empty before."""
    cache_bytes: int = 0
    arena_bytes: int = 0
    manifest: dict[str, Any] = {}


class EngineList(_Answer):
    engines: list[EngineRecord]


class ExplainTables(_Request):
    """`source`: by rank, then group (or by group for a single source); `destination`: by group; `tokens`: [A, B)."""

    source: dict[str, Any]
    destination: dict[str, Any]
    tokens: Span


class ExplainRequest(_Request):
    sources: Annotated[list[dict[str, Any]], Field(min_length=1)]
    destination: dict[str, Any]
    tables: ExplainTables | None = None


class PlanRead(_Answer):
    """The part that one rank reads from one source rank: the same share of some components in some layers.

    The share is [start, stop) of `total` positions of `axis`; an empty axis means that nothing is sharded. A paged
    group's tokens are those that `token_shard` has. nbytes: of one such token, in a state group of the whole state.
    """

    reader: int
    source: int
    group: str
    kind: Literal["paged", "state"]
    layers: list[int]
    components: list[str]
    axis: str = ""
    start: int
    stop: int
    total: int
    token_shard: dict[str, int] = {}
    nbytes: int


class PlanRecord(_Answer):
    """The plan between two engines. `missing`: our ranks that could not be asked, and why."""

    source_engine_id: str
    source_epoch: str
    source_world_size: int
    engine_id: str
    epoch: str
    world_size: int
    reads: list[PlanRead]
    missing: dict[int, str] = {}


class DrainStatus(_Answer):
    draining: bool
    leases: int
    transfers: int
    drained: bool


class DrainRequest(_Request):
    """`wait_s`: hold the answer until nothing is left, at most this long."""

    wait_s: Annotated[float, Field(ge=0, le=3600), Number] = 0.0


class AbortResult(_Answer):
    transfers_ended: int
    leases_ended: int


class Info(_Answer):
    version: str
    protocol: tuple[int, int]
    instance: str
    device: str
    rest: str
    peer: str
    advertise: str
    engine_socket: str
    way: str
    strict: bool
    transports: list[str]
    uptime_s: float


class FailedLately(_Answer):
    """failed: requests that failed in the last five minutes: what was read here, on rank 0 on any rank of its engine;
    and leases here that could not be published, not those that expired unread: their clients may have left. last: the
    last of them."""

    failed: int
    last: FailedRequest


class Standing(enum.StrEnum):
    """How a daemon stands."""

    READY = "ready"
    DEGRADED = "degraded"
    """It takes work, and something is wrong: there is a warning, or a request failed in the last five minutes."""
    NOT_READY = "not ready"


class Readiness(_Answer):
    """ready: whether work should be sent here. state: whether all is well, too. reasons: why no work should be sent.
    warnings: what is wrong and does not stop other work: peers that do not answer, memory that could not be given back.
    The failures are in `failed_lately` of /v1/totals."""

    ready: bool
    state: Standing
    reasons: list[str] = []
    warnings: list[str] = []


class Totals(_Answer):
    """Totals that this daemon holds now, and has moved since its start. Each daemon of an engine of several ranks
    counts its own share.

    transfers, leases: how many are in each state; those that have ended count for as long as they are remembered.
    Rank 0 counts a transfer that is over as it ended on all ranks.
    waiting: how many transfers wait for what. queue: transfers without an order or a reservation, and waits for a
    staging slot. unfreed_bytes: memory of sessions that are over, which could not be freed or may still be written.
    read_bytes, served_bytes: they never become less while the daemon runs. process_bytes: the memory of the daemon's
    process that is resident, host memory of caches and arenas in it. readiness: as /readyz answers.
    """

    transfers: dict[str, int]
    waiting: dict[str, int]
    leases: dict[str, int]
    live_readers: int
    queue: int
    quarantined_bytes: int
    unfreed_bytes: int
    staging_bytes: int
    staging_used_bytes: int
    read_bytes: int
    served_bytes: int
    process_bytes: int = 0
    failed_lately: FailedLately | None = None
    readiness: Readiness | None = None


class MarkKind(enum.StrEnum):
    """The kinds of marks in the history."""

    START = "start"
    """A daemon began to serve."""
    UPGRADE = "upgrade"
    """So did one that the keeper had loaded in place of the one before, which had stopped."""
    DEATH = "death"
    """The daemon before had not stopped by itself."""
    DRAIN = "drain"
    CANCELLED = "drain cancelled"
    STOP = "stop"


class HistoryMark(_Answer):
    """at: seconds since 1970; a death is known when the next daemon starts. why: who asked for a drain, or what became
    of the daemon before."""

    at: float
    kind: MarkKind
    why: str = ""


class HistoryFigures(_Answer):
    """This rank's share of what ended in a time. failures: how many failed, by code. p50_ms, p99_ms: of those that were
    done, without the wait for order, reservation and publish, right to an eighth; None where none was."""

    done: int = 0
    failed: int = 0
    aborted: int = 0
    read_bytes: int = 0
    served_bytes: int = 0
    failures: dict[str, int] = {}
    p50_ms: float | None = None
    p99_ms: float | None = None


class HistoryPoint(HistoryFigures):
    """at: when the point's time begins, seconds since 1970."""

    at: int


class HistoryPeer(HistoryFigures):
    """Figures of one engine elsewhere: what was read from it, and what it read here. `other` is the sum of engines that
    have no place of their own."""

    engine_id: str


class History(_Answer):
    """now: by the daemon's clock, seconds since 1970. began_at: nothing is known of the time before. points: times
    in which something ended, the oldest first."""

    now: float
    began_at: int
    span_s: int
    step_s: int
    points: list[HistoryPoint] = []
    marks: list[HistoryMark] = []
    peers: list[HistoryPeer] = []


class Health(_Answer):
    status: Literal["ok"] = "ok"
