"""Memory that holds KV. A provider for each kind allocates regions that the daemon owns and adopts regions that an
engine owns. The maker of a region closes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.file import File
from kvferry.v1 import engine_pb2
from kvferryd.config import Config
from kvferryd.memory.kept import Keeper
from kvferryd.transport.read import Span


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes that lie `offset` bytes into a region's allocation: a peer that maps it finds them there."""

    offset: int
    held: bytes


@dataclass(slots=True)
class Files:
    """File descriptors that this process owns. A context manager that closes them."""

    numbers: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Idempotent."""
        numbers, self.numbers = self.numbers, []
        for number in numbers:
            os.close(number)

    def moved(self) -> Files:
        """The same descriptors, which are those of the other from now on."""
        numbers, self.numbers = self.numbers, []
        return Files(numbers)

    def __enter__(self) -> list[int]:
        return self.numbers

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Region:
    """Registered KV-cache memory."""

    span: Span
    owned: bool
    """Allocated here or by a daemon before this one: it outlives its engine. Otherwise it is an engine's own."""
    told: engine_pb2.Memory = field(repr=False)
    """Tells an engine or a peer how to map it. For adopted memory, what its engine told us: a mapping cannot be
    exported again, so peers get the engine's own handle."""
    undo: ExitStack = field(repr=False)
    """Closing it frees or unmaps the memory."""
    slow_source: str = ""
    """Why a peer should not read it directly, in words; empty where nothing is against it."""
    unmappable: str = ""
    """Why a peer cannot map it, likewise."""
    probe: Callable[[], Probe | None] = lambda: None
    """None for memory that a peer cannot map. Blocks for as long as reading a few bytes takes. Raises KvferryError when
    the memory has been given back."""
    files: Sequence[File] = field(default=(), repr=False)
    """They keep the memory, which goes when the last process that has them open, daemon or engine, has gone. None of
    GPU memory that goes with the daemon; of others one, or one for each of an engine's own allocations."""

    def exported(self, region: int) -> engine_pb2.Memory:
        """`told`, as the memory of an engine's region of this number."""
        memory = engine_pb2.Memory(region=region)
        memory.MergeFrom(self.told)
        return memory

    def close(self) -> None:
        """Free or unmap. Call it as soon as the engine is gone: a mapping keeps memory taken, here and in every other
        process. Idempotent."""
        self.undo.close()


class Provider(Protocol):
    def allocate(self, nbytes: int, *, kept: bool = False) -> Region:
        """A new zeroed region. kept: it is to outlive this process, if that can be had. Raises KvferryError
        (`out_of_memory`)."""

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> Region:
        """Map memory that an engine owns. `files`: those that it was handed over with; the caller closes them. Raises
        KvferryError."""


def provider(config: Config, keeper: Keeper | None = None) -> Provider:
    """The provider for the configured device. Raises KvferryError when this machine cannot have it."""
    if config.device == "cpu":
        from kvferryd.memory.host import HostProvider

        return HostProvider()
    from kvferryd.memory.cuda import CudaProvider

    # Memory that outlives this process is imported here: NIXL reads it directly at a hundredth of the link's rate, and
    # whether a NIC can be given it is not known.
    if config.way == "direct" or config.require_rdma:
        return CudaProvider(config.device)
    return CudaProvider(config.device, keeper, shared=config.node_dir is not None)
