"""Builds a manifest from an engine's own arrays or tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from kvferry.manifest.manifest import Manifest
from kvferry.manifest.model import ManifestError, ModelInfo, Shard, TokenShard


class Strided(Protocol):
    """The common part of numpy arrays and torch tensors: a shape, a dtype, strides, an address."""

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
    >>> axes, heads = ("block", "slot", "head", "dim"), Shard(axis="head", start=0, total=8)
    >>> builder.component("full", layer=0, name="k", array=k, axes=axes, shard=heads)
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
        self._regions: list[dict[str, object]] = []
        self._groups: list[dict[str, object]] = []
        self._components: list[dict[str, object]] = []
        self._places: dict[int, range] = {}
        """Addresses of each region in this process."""
        self._manifest = {
            "engine_id": engine_id,
            "epoch": epoch,
            "model": model,
            "rank": rank,
            "world_size": world_size,
            "parallel": dict(parallel or {}),
            "regions": self._regions,
            "groups": self._groups,
            "components": self._components,
        }

    def region(self, id: int, kind: str, *, nbytes: int, address: int) -> ManifestBuilder:
        """`address`: where the region begins in this process; offsets are measured from it."""
        self._regions.append({"id": id, "kind": kind, "nbytes": nbytes})
        self._places[id] = range(address, address + nbytes)
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
        group = {"name": name, "kind": kind, "block_size": block_size, "num_blocks": num_blocks, "window": window}
        self._groups.append(group | {"token_shard": token_shard or TokenShard()})
        return self

    def component(
        self,
        group: str,
        *,
        layer: int,
        name: str,
        array: Strided,
        axes: Sequence[str],
        region: int | None = None,
        shard: Shard | None = None,
        encoding: str | None = None,
        whole: Sequence[str] = (),
    ) -> ManifestBuilder:
        """`axes` names the array's dimensions in order; a name may occur twice (mixed radix, outer first). `region`: in
        which it lies; without one the region that has its address.

        `encoding`: what the bytes mean, where the dtype does not say it: one of `ENCODINGS`, or `opaque:NAME`, which is
        moved whole or not at all. `whole`: axes that may not be divided, nor laid out otherwise on the other side.
        """
        address, shape, strides, dtype = _geometry(array)
        breach = partial(ManifestError, component=f"{layer}.{name}")
        if len(axes) != len(shape):
            message = f"{len(axes)} axis names for an array of {len(shape)} dimensions"
            remedy = f"name every dimension of the shape {shape}"
            raise breach("axes", message, field="axes", value=tuple(axes), remedy=remedy)
        if region is None:
            region = next((id for id, place in self._places.items() if address in place), 0)
        if region not in self._places:
            message = f"region {region} was not described"
            raise breach("unknown_region", message, field="region", value=region, remedy="call region() first")
        place = self._places[region]
        if address not in place:
            message = f"the array begins at {address:#x}, outside of region {region} at {place.start:#x}"
            remedy = "give a view of the region's own memory: region.array(), not a copy of it"
            code = "malformed_manifest" if address < place.start else "out_of_region"
            raise breach(code, message, field="array", value=shape, remedy=remedy)
        self._components.append(
            {
                "group": group,
                "layer": layer,
                "name": name,
                "dtype": dtype,
                "region": region,
                "offset": address - place.start,
                "axes": [{"name": n, "extent": e, "stride": s} for n, e, s in zip(axes, shape, strides, strict=True)],
                "shard": shard,
                "encoding": encoding,
                "whole": tuple(whole),
            }
        )
        return self

    def build(self) -> Manifest:
        """The checked manifest. Raises ManifestError."""
        return Manifest.from_dict(self._manifest)
