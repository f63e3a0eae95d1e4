"""The message from the scheduler's connector to the workers' with each engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvferry.handoff import Origin
from kvferry.tables import BlockTable


@dataclass(frozen=True, slots=True)
class Publish:
    """The KV of tokens [0, num_tokens) is in these blocks; `last` when no more follows.

    lease: its number. num_tokens may count the room after the request's last token. digest: of the tokens of the whole
    publish. since: the number of the oldest step that may have computed, loaded or cached any of it.
    """

    request_id: str
    lease: int
    tables: dict[str, BlockTable]
    num_tokens: int
    last: bool
    digest: bytes
    since: int
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class Load:
    """Read tokens [start, stop) from another engine, and zero what they leave of the blocks. No tokens and empty
    tables: only end the lease. since: the number of the oldest step that may have computed any token before them."""

    request_id: str
    origin: Origin
    tables: dict[str, BlockTable]
    tokens: tuple[int, int]
    attempt: int
    since: int


@dataclass(slots=True)
class Step(KVConnectorMetadata):
    """In the order in which a worker acts on them. number: from 1; every worker gets every step."""

    number: int = 0
    revoke: list[str] = field(default_factory=list)
    """Requests whose blocks other requests may get in this very step: their leases are revoked first."""
    cancel: list[str] = field(default_factory=list)
    """Requests that were aborted while their KV was on its way."""
    finished: list[Publish] = field(default_factory=list)
    """The KV of requests that are over, all of it computed in earlier steps."""
    hold: list[str] = field(default_factory=list)
    """Requests whose blocks wait for their readers: report each once, when its lease has ended."""
    unread: list[str] = field(default_factory=list)
    """Requests whose leases nobody is told of: another answer to the same prompt has one."""
    load: list[Load] = field(default_factory=list)
    release: list[Load] = field(default_factory=list)
    """KV that will not be read: its leases are ended."""
    refuse: list[str] = field(default_factory=list)
    """Requests whose kv_transfer_params were refused: report them as failed loads."""
    computed: list[Publish] = field(default_factory=list)
    """KV that is there when this step has been computed."""
    idle: bool = False
    """Nothing is computed: all requests wait for their KV, or for their readers."""


@dataclass(frozen=True, slots=True)
class Address(KVConnectorHandshakeMetadata):
    """host:port at which other daemons reach a worker's daemon."""

    address: str
