"""The REST bodies, shared by the daemon that answers and the client that asks.

Times are milliseconds where the name ends in `_ms`, sizes are bytes. Unknown fields of a request are refused
with their name; unknown fields of an answer are ignored, so that an old client reads a new daemon.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints


def _number(given: object) -> object:
    if isinstance(given, bool | str):  # pydantic takes true for 1, and "1" too
        raise ValueError("it is not a number")
    return given


Whole = Annotated[int, BeforeValidator(_number)]
Span = tuple[Annotated[Whole, Field(ge=0)], Annotated[Whole, Field(ge=0)]]
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Address = Annotated[str, StringConstraints(pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:/]+):\d{1,5}$", max_length=300)]


class TransferState(enum.StrEnum):
    """Destination side. `daemon/kvferryd/states.py` has the table of legal moves."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    READING = "reading"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        return self in (TransferState.DONE, TransferState.FAILED, TransferState.ABORTED)


class LeaseState(enum.StrEnum):
    """Source side."""

    PUBLISHING = "publishing"
    PUBLISHED = "published"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"

    @property
    def ended(self) -> bool:
        return self in (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED)


Way: TypeAlias = Literal["auto", "direct", "staged", "mapped"]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


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
    """`address`: host:port of the peer service of any rank's daemon. `epoch`: refuse any other start of the engine."""

    engine_id: RequestId
    address: Address
    epoch: Annotated[str, StringConstraints(max_length=256)] | None = None


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
    move this one; as the daemon is configured where absent. `attempt`: counts the attempts at this request from 1; a
    higher one than before begins anew, without one the order belongs to the attempt under way.

    `destination.engine_id` (or the daemon's only engine) says which engine receives.
    """

    request_id: RequestId
    source: SourceBody
    destination: DestinationBody | None = None
    priority: Annotated[Whole, Field(ge=-100, le=100)] = 0
    deadline_ms: Annotated[Whole, Field(ge=1, le=3_600_000)] | None = None
    way: Way | None = None
    attempt: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None


class Ordered(_Answer):
    transfer_id: str
    state: TransferState


class ErrorBody(_Answer):
    code: str
    message: str
    field: str = ""
    value: str = ""
    remedy: str = ""


class RankTransfer(_Answer):
    """One rank's share of a transfer."""

    rank: int
    state: TransferState
    bytes: int = 0
    descriptors: int = 0
    path: str = ""
    transport: str = ""
    phases_ms: dict[str, float] = {}
    error: ErrorBody | None = None


class TransferRecord(_Answer):
    """A transfer as the daemon that took the order sees it: all ranks of its engine together.

    bytes and descriptors: sums over ranks. path: direct, staged or mapped. transport: what NIXL used, for example
    "UCX", or "cuda_ipc". phases_ms: this rank's time in each state, `total`, and `moving`: reading without waits
    for a publish. tokens: the global range moved.
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
    phases_ms: dict[str, float] = {}
    ranks: list[RankTransfer] = []
    error: ErrorBody | None = None
    created_at: float = 0.0


class TransferList(_Answer):
    transfers: list[TransferRecord]


class LeaseRecord(_Answer):
    request_id: str
    engine_id: str
    epoch: str
    state: LeaseState
    num_tokens: int
    readers_expected: int
    readers_open: int
    readers_closed: int
    expires_in_ms: float | None = None
    """None while a reader is live: a lease with a live reader does not expire."""


class LeaseList(_Answer):
    leases: list[LeaseRecord]


class PeerRequest(_Request):
    """Prewarm: shake hands now with every rank of this engine, on behalf of `destination` (or the only engine)."""

    engine_id: RequestId
    address: Address
    destination: RequestId | None = None


class PeerRecord(_Answer):
    engine_id: str
    rank: int
    address: str
    epoch: str
    protocol: int
    version: str
    agent: str
    ways: dict[str, str] = {}
    """Every way of moving: empty when the pair can take it, otherwise why not."""
    bytes_read: int = 0
    transfers: int = 0


class PeerList(_Answer):
    peers: list[PeerRecord]


class EngineRecord(_Answer):
    engine_id: str
    epoch: str
    rank: int
    world_size: int
    attached: bool
    members: dict[int, str] = {}
    """Peer address by rank, as far as known."""
    notes: list[str] = []
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


class DrainStatus(_Answer):
    draining: bool
    leases: int
    transfers: int
    drained: bool


class DrainRequest(_Request):
    """`wait_s`: hold the answer until nothing is left, at most this long."""

    wait_s: Annotated[float, BeforeValidator(_number), Field(ge=0, le=3600)] = 0.0


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


class Readiness(_Answer):
    ready: bool
    reasons: list[str] = []


class Health(_Answer):
    status: Literal["ok"] = "ok"
