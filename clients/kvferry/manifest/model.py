"""The parts of a manifest: regions, groups, components with named, strided axes."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from kvferry.checked import Checked
from kvferry.errors import Malformed
from kvferry.manifest.encoding import is_opaque, meaning

BLOCK, SLOT = "block", "slot"
ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by the dtype names that torch and numpy (ml_dtypes) share."""


MOST = {"regions": 4096, "groups": 1024, "components": 65536, "axes": 16, "whole": 16, "parallel": 1024}
"""The most of each in a manifest, or in a component."""


class ManifestError(Malformed):
    """A manifest that breaks a rule. `field` names the component and field, `value` what stands there."""

    def __init__(self, code: str, message: str, *, component: str = "", field: str = "", **more: Any) -> None:
        """component: its label, which is put before the message and the field."""
        if component:
            message, field = f"component {component}: {message}", f"components[{component}].{field}"
        super().__init__(code, message, field=field, **more)
        self.component = component


def malformed(error: ValidationError, *within: str) -> ManifestError:
    """The first fault that pydantic found in a manifest, or in a part of it: within."""
    first = error.errors(include_url=False)[0]
    field = ".".join([*within, *(str(part) for part in first["loc"])]) or "manifest"
    message = f"the manifest is malformed at {field}: {first['msg']}"
    remedy = "docs/protocol.md lists every field of the manifest with an example"
    return ManifestError("malformed_manifest", message, field=field, value=first.get("input", ""), remedy=remedy)


Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, lt=2**62, strict=True)]
Position = Annotated[int, Field(ge=0, lt=2**62, strict=True)]
SmallCount = Annotated[int, Field(ge=1, lt=2**32, strict=True)]
Small = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
"""An unsigned 32-bit integer on the wire."""


class Part(Checked):
    """A fault in a part that Python makes is a KvferryError (`malformed_manifest`), as in a manifest that is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def _fault(cls, error: ValidationError) -> ManifestError:
        return malformed(error, cls.__name__)


class ModelInfo(Part):
    name: Name
    fingerprint: Name
    """Equal on both sides or the pair is refused: weights, head counts and dtype, not a path or a version."""


class Region(Part):
    id: Annotated[int, Field(ge=0, lt=2**31, strict=True)]
    kind: Literal["cuda", "host"]
    nbytes: Count


class TokenShard(Part):
    """Context parallelism: token t lives on rank (t // interleave) % size."""

    rank: Small = 0
    size: SmallCount = 1
    interleave: SmallCount = 1


class Group(Part):
    """A block-table namespace. `block_size` in tokens; `window` in tokens, the newest included."""

    name: Name
    kind: Literal["paged", "state"] = "paged"
    block_size: SmallCount = 1
    num_blocks: Count
    window: SmallCount | None = None
    token_shard: TokenShard = TokenShard()


class Axis(Part):
    """`extent` in positions, `stride` in bytes. A name that occurs twice is mixed radix, outer first."""

    name: Name
    extent: Count
    stride: Position


class Shard(Part):
    """This rank holds [start, start + extent(axis)) of a global axis of length `total`."""

    axis: Name
    start: Position
    total: Count


Shared = TypeVar("Shared", "tuple[Axis, ...]", "Shard")


def _shared(part: Shared) -> Shared:
    """The first that is equal to it: of a cache's components most are alike but for their layer. Without it the garbage
    collector goes through millions of objects where a manifest is large, and nothing else goes on meanwhile.

    Pydantic keeps the interpreter to itself while it reads; as this is Python, other threads get their turn here.
    """
    first: Shared = _first(part)
    return first


@functools.lru_cache(maxsize=256)
def _first(part: Shared) -> Shared:
    return part


class Component(Part):
    """An array of a layer.

    `encoding`: what its bytes mean, one of `ENCODINGS` or `opaque:NAME`; absent, what the dtype says. `whole`: axes
    that may not be divided (between ranks, blocks or token ranges), nor laid out otherwise on the other side.
    """

    group: Name
    layer: Small
    name: Name
    dtype: Name
    region: Small
    offset: Position
    axes: Annotated[tuple[Axis, ...], Field(min_length=1, max_length=MOST["axes"]), AfterValidator(_shared)]
    shard: Annotated[Shard, AfterValidator(_shared)] | None = None
    encoding: Name | None = None
    whole: Annotated[tuple[Name, ...], Field(max_length=MOST["whole"])] = ()

    @property
    def meaning(self) -> str:
        """The encoding of its bytes, `opaque:NAME` where nobody has described it."""
        return meaning(self.dtype, self.encoding)

    @property
    def undivided(self) -> frozenset[str]:
        """Axes that both sides must hold alike and move whole: `whole`, or all of what is opaque. Never block."""
        opaque = is_opaque(self.meaning)
        return frozenset(axis.name for axis in self.axes if axis.name != BLOCK) if opaque else frozenset(self.whole)

    @property
    def label(self) -> str:
        """How errors and refusals name it, for example `3.k`."""
        return f"{self.layer}.{self.name}"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes_spanned(self) -> int:
        """From the first byte to one past the last, gaps included."""
        return sum((axis.extent - 1) * axis.stride for axis in self.axes) + self.itemsize

    def extent(self, name: str) -> int:
        """Positions on a logical axis: the product over its digits. 1 where the axis is absent."""
        return math.prod(axis.extent for axis in self.axes if axis.name == name)
