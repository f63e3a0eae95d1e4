"""What driver and workers send each other: a message is one JSON object. No pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from kvferry.reference.config import EngineConfig, ModelSource


@dataclass(frozen=True, slots=True)
class Start:
    """The first message. rendezvous: a file that the ranks of one start share, to find each other.

    region_path, region_offset: the daemon-owned region to map; an empty path for private memory.
    """

    source: ModelSource
    engine: EngineConfig
    rank: int
    rendezvous: str
    region_path: str = ""
    region_offset: int = 0
    op: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all ranks. Per sequence: its first position, how many tokens, how many blocks, whether to sample."""

    tokens: list[int]
    starts: list[int]
    counts: list[int]
    blocks: list[int]
    num_blocks: list[int]
    sample: list[bool]
    op: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class Done:
    """The start, or a step, is done. tokens: sampled, in the order of the sequences that sample; rank 0's only."""

    tokens: list[int] = field(default_factory=list)
    op: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends. why: for people."""

    why: str
    op: Literal["failed"] = "failed"


Message: TypeAlias = Start | Step | Done | Failed
_message: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="op")])


def packed(message: Message) -> bytes:
    return _message.dump_json(message)


def unpacked(data: bytes) -> Message:
    return _message.validate_json(data)
