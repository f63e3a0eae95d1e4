"""The manifest: one engine rank's KV cache as numbers.

A cache is a set of components (layer 3's keys, layer 7's convolution state), each an array with named axes and
byte strides inside a region of memory. Every layout, parallelism and block size is a choice of these numbers;
nothing else in kvferry knows about any of them. design.md, section 4, fixes the JSON form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvferry.rules import BLOCK, ITEMSIZE, SLOT, ManifestError, check

__all__ = [
    "BLOCK",
    "ITEMSIZE",
    "SLOT",
    "Axis",
    "Component",
    "Group",
    "Manifest",
    "ManifestBuilder",
    "ManifestError",
    "ModelInfo",
    "Region",
    "Shard",
    "TokenShard",
]

Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, lt=2**62, strict=True)]
Position = Annotated[int, Field(ge=0, lt=2**62, strict=True)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelInfo(_Model):
    name: Name
    fingerprint: Name
    """Equal on both sides or the pair is refused: weights, head counts and dtype, not a path or a version."""


class Region(_Model):
    id: Annotated[int, Field(ge=0, lt=2**31, strict=True)]
    kind: Literal["cuda", "host"]
    nbytes: Count


class TokenShard(_Model):
    """Context parallelism: token t lives on rank (t // interleave) % size."""

    rank: Position = 0
    size: Count = 1
    interleave: Count = 1


class Group(_Model):
    """A block-table namespace. `block_size` in tokens; `window` in tokens, the newest included."""

    name: Name
    kind: Literal["paged", "state"] = "paged"
    block_size: Count = 1
    num_blocks: Count
    window: Count | None = None
    token_shard: TokenShard = TokenShard()


class Axis(_Model):
    """`extent` in positions, `stride` in bytes. A name that occurs twice is mixed radix, outer first."""

    name: Name
    extent: Count
    stride: Position


class Shard(_Model):
    """This rank holds [start, start + extent(axis)) of a global axis of length `total`."""

    axis: Name
    start: Position
    total: Count


class Component(_Model):
    group: Name
    layer: Position
    name: Name
    dtype: Name
    region: Annotated[int, Field(ge=0, strict=True)]
    offset: Position
    axes: Annotated[tuple[Axis, ...], Field(min_length=1, max_length=16)]
    shard: Shard | None = None

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


class Manifest(_Model):
    """One engine rank's cache. Build it with `ManifestBuilder`, or read it with `Manifest.from_json`.

    Constructing one directly checks types only; `validated()` checks every rule.
    """

    engine_id: Name
    epoch: Name
    model: ModelInfo
    rank: Position = 0
    world_size: Count = 1
    parallel: dict[str, int] = Field(default_factory=dict)
    regions: Annotated[tuple[Region, ...], Field(min_length=1, max_length=4096)]
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=1024)]
    components: Annotated[tuple[Component, ...], Field(min_length=1, max_length=65536)]

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse and check. Raises ManifestError naming component, field and value."""
        try:
            return cls.model_validate_json(text).validated()
        except ValidationError as error:
            raise _from_pydantic(error) from None

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """The same for parsed JSON."""
        try:
            return cls.model_validate(data).validated()
        except ValidationError as error:
            raise _from_pydantic(error) from None

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=False)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def validated(self) -> Manifest:
        """Check every rule; returns self. Raises ManifestError at the first breach."""
        check(self)
        return self


def _from_pydantic(error: ValidationError) -> ManifestError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "manifest"
    return ManifestError(
        "malformed_manifest",
        f"the manifest is malformed at {field}: {first['msg']}",
        field=field,
        value=first.get("input", ""),
        remedy="docs/protocol.md lists every field of the manifest with an example",
    )


class Strided(Protocol):
    """What numpy arrays and torch tensors have in common: a shape, a dtype, strides, an address."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...


def _geometry(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """(address, shape, strides in bytes, dtype name) of a numpy array or a torch tensor."""
    shape = tuple(int(extent) for extent in array.shape)
    dtype = str(array.dtype).removeprefix("torch.")
    if hasattr(array, "data_ptr"):
        item = int(array.element_size())
        return int(array.data_ptr()), shape, tuple(int(stride) * item for stride in array.stride()), dtype
    interface = array.__array_interface__
    return int(interface["data"][0]), shape, tuple(int(stride) for stride in array.strides), dtype


class ManifestBuilder:
    """Describes a cache from the engine's own arrays or tensors; nothing is copied.

    >>> builder = ManifestBuilder("prefill", epoch, ModelInfo(name="m", fingerprint="f"))
    >>> builder.region(0, "host", nbytes=memory.nbytes, address=memory.address)
    >>> builder.group("full", block_size=16, num_blocks=1024)
    >>> builder.component("full", layer=0, name="k", array=k, axes=("block", "slot", "head", "dim"),
    ...                   region=0, shard=Shard(axis="head", start=0, total=8))
    >>> manifest = builder.build()
    """

    def __init__(
        self,
        engine_id: str,
        epoch: str,
        model: ModelInfo,
        *,
        rank: int = 0,
        world_size: int = 1,
        parallel: Mapping[str, int] | None = None,
    ) -> None:
        self._head: dict[str, Any] = {
            "engine_id": engine_id,
            "epoch": epoch,
            "model": model,
            "rank": rank,
            "world_size": world_size,
            "parallel": dict(parallel or {}),
        }
        self._regions: list[dict[str, Any]] = []
        self._addresses: dict[int, int] = {}
        self._groups: list[dict[str, Any]] = []
        self._components: list[dict[str, Any]] = []

    def region(self, id: int, kind: str, *, nbytes: int, address: int) -> ManifestBuilder:
        """`address`: where the region begins in this process; offsets are measured from it."""
        self._regions.append({"id": id, "kind": kind, "nbytes": nbytes})
        self._addresses[id] = address
        return self

    def group(
        self,
        name: str,
        *,
        num_blocks: int,
        block_size: int = 1,
        kind: str = "paged",
        window: int | None = None,
        token_shard: TokenShard | None = None,
    ) -> ManifestBuilder:
        self._groups.append(
            {
                "name": name,
                "kind": kind,
                "block_size": block_size,
                "num_blocks": num_blocks,
                "window": window,
                "token_shard": token_shard or TokenShard(),
            }
        )
        return self

    def component(
        self,
        group: str,
        *,
        layer: int,
        name: str,
        array: Strided,
        axes: Sequence[str],
        region: int = 0,
        shard: Shard | None = None,
    ) -> ManifestBuilder:
        """`axes` names the array's dimensions in order; a name may occur twice (mixed radix, outer first)."""
        address, shape, strides, dtype = _geometry(array)
        label = f"{layer}.{name}"
        if len(axes) != len(shape):
            raise ManifestError(
                "axes",
                f"component {label}: {len(axes)} axis names for an array of {len(shape)} dimensions",
                component=label,
                field=f"components[{label}].axes",
                value=tuple(axes),
                remedy=f"name every dimension of the shape {shape}",
            )
        if region not in self._addresses:
            raise ManifestError(
                "unknown_region",
                f"component {label}: region {region} was not described",
                component=label,
                field=f"components[{label}].region",
                value=region,
                remedy="call region() first",
            )
        self._components.append(
            {
                "group": group,
                "layer": layer,
                "name": name,
                "dtype": dtype,
                "region": region,
                "offset": address - self._addresses[region],
                "axes": [{"name": n, "extent": e, "stride": s} for n, e, s in zip(axes, shape, strides, strict=True)],
                "shard": shard,
            }
        )
        return self

    def build(self) -> Manifest:
        """The checked manifest. Raises ManifestError."""
        return Manifest.from_dict(
            self._head | {"regions": self._regions, "groups": self._groups, "components": self._components}
        )
