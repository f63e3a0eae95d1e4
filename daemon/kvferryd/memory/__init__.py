"""Memory that holds KV: one folder per kind, of equal shape.

A provider allocates regions that the daemon owns and adopts regions that an engine owns; a region knows its address
here and how to tell an engine where it is. Whoever made a region closes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.v1 import engine_pb2
from kvferryd.config import Config
from kvferryd.transport import Span


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes that lie `offset` bytes into a region's allocation: a peer that maps it finds them there."""

    offset: int
    held: bytes


@dataclass(slots=True)
class Files:
    """Open files of ours. A context manager that closes them."""

    numbers: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Idempotent."""
        numbers, self.numbers = self.numbers, []
        for number in numbers:
            os.close(number)

    def __enter__(self) -> list[int]:
        return self.numbers

    def __exit__(self, *_: object) -> None:
        self.close()


class Region(Protocol):
    """Registered KV-cache memory. `owned`: allocated here; otherwise adopted from an engine.

    slow_source: why a peer should not read it directly, in words; empty where nothing is against it.
    unmappable: why a peer cannot map it, likewise.
    """

    @property
    def slow_source(self) -> str: ...
    @property
    def unmappable(self) -> str: ...
    @property
    def span(self) -> Span: ...
    @property
    def owned(self) -> bool: ...
    def probe(self) -> Probe | None:
        """None for memory that a peer cannot map. Blocks for as long as reading a few bytes takes."""

    def exported(self, region: int) -> engine_pb2.Memory:
        """What an engine needs to map it; of a HostRegion, beside its `files`."""

    def close(self) -> None: ...


class Provider(Protocol):
    def allocate(self, nbytes: int) -> Region: ...
    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> Region:
        """`files`: those that the memory was handed over with. The caller closes them."""

    def close(self) -> None: ...


def provider(config: Config) -> Provider:
    """The provider for the configured device. Raises KvferryError when this machine cannot have it."""
    if config.device == "cpu":
        from kvferryd.memory.host import HostProvider

        return HostProvider()
    from kvferryd.memory.cuda import CudaProvider

    return CudaProvider(config.device)
