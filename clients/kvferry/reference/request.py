"""A request inside the engine."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvferry.errors import KvferryError
from kvferry.handoff import Handoff, Origin

FinishReason = Literal["stop", "length"]


class RequestState(enum.Enum):
    """WAITING -> [LOADING ->] RUNNING -> [HELD ->] DONE; from any of them straight to DONE by abort or error.

    WAITING for blocks. LOADING: blocks reserved, KV on its way from another engine. RUNNING: prefill or decode.
    HELD: generation is over, another engine may read the blocks.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens; with `finish_reason`, the last output of the request."""

    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    handoff: Handoff | None = None
    """How another engine finds the KV, when the request asked for that."""


@dataclass(slots=True, eq=False)
class Request:
    """`origin`: where the KV of a first part of the prompt is to be read from. `hold`: publish the KV afterwards."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stops: Callable[[list[int]], bool] | None = None
    """Whether the generated tokens contain a stop string."""
    origin: Origin | None = None
    hold: bool = False
    second_turn: bool = False
    """The KV is kept for the next turn of a conversation, not for an engine that takes over this one."""

    state: RequestState = RequestState.WAITING
    generated: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    cached: int = 0
    """Tokens of the prompt that the prefix cache held on admission."""
    received: int = 0
    """Tokens of the prompt that came from another engine."""
    window_first: int = 0
    """Sliding layers hold nothing of use before this token (a multiple of the block size)."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cancelled: bool = False
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request has blocks, or will not get any."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no step touches the request any more."""
    finish_reason: FinishReason | None = None
    outputs: asyncio.Queue[Output | KvferryError] = field(default_factory=asyncio.Queue)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def accept(self, token: int) -> None:
        """A token was generated, here or by the engine that prefilled; sets `finish_reason` after the last."""
        assert self.finish_reason is None
        self.generated.append(token)
        ends = token in self.stop_token_ids and len(self.generated) >= self.min_tokens
        if ends or (self.stops is not None and self.stops(self.generated)):
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"
