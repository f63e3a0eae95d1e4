"""What driver and workers say to each other: a JSON header and raw int64 arrays. No pickle."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.reference.config import EngineConfig, ModelConfig, ModelSource

Ints: TypeAlias = npt.NDArray[np.int64]
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """op: start, ready, step, done, failed or stop. text: a JSON document or a message for people."""

    op: str
    text: str = ""
    arrays: dict[str, Ints] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        lengths = {name: len(array) for name, array in self.arrays.items()}
        header = json.dumps({"op": self.op, "text": self.text, "arrays": lengths}).encode()
        bodies = (np.ascontiguousarray(array, dtype="<i8").tobytes() for array in self.arrays.values())
        return b"".join([_LENGTH.pack(len(header)), header, *bodies])

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        at, arrays = _LENGTH.size + length, {}
        for name, count in header["arrays"].items():
            # A copy: torch wants writable memory, and torch.from_numpy then needs no copy of its own.
            arrays[name] = np.frombuffer(data, dtype="<i8", count=count, offset=at).astype(np.int64)
            at += 8 * count
        return cls(header["op"], header["text"], arrays)


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One step of all ranks. Per sequence: its first position, how many tokens, how many blocks, whether to sample."""

    tokens: Ints
    starts: Ints
    counts: Ints
    blocks: Ints
    num_blocks: Ints
    sample: Ints

    def message(self) -> Message:
        return Message("step", arrays={name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of(cls, message: Message) -> StepInput:
        return cls(**message.arrays)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message. rendezvous: a file that the ranks of one start share, to find each other.

    region_path, region_offset: the daemon-owned region to map; an empty path for private memory.
    """

    source: ModelSource
    engine: EngineConfig
    rank: int
    rendezvous: str
    region_path: str = ""
    region_offset: int = 0

    def message(self) -> Message:
        source = {
            "config": self.source.config.to_hf(),
            "checkpoint": str(self.source.checkpoint or ""),
            "seed": self.source.seed,
        }
        fields = dataclasses.asdict(self) | {"source": source}
        return Message("start", text=json.dumps(fields))

    @classmethod
    def of(cls, message: Message) -> WorkerStart:
        fields = json.loads(message.text)
        source, engine = fields.pop("source"), fields.pop("engine")
        checkpoint = Path(source["checkpoint"]) if source["checkpoint"] else None
        return cls(
            source=ModelSource(ModelConfig.from_hf(source["config"]), checkpoint, source["seed"]),
            engine=EngineConfig(**engine | {"daemons": tuple(engine["daemons"])}),
            **fields,
        )
