"""The manifest: one engine rank's KV cache as numbers.

A cache is a set of components (layer 3's keys, layer 7's convolution state), each an array with named axes and
byte strides inside a region of memory. Every layout, parallelism and block size is a choice of these numbers;
nothing else in kvferry knows about any of them. docs/protocol.md lists every field and rule of the JSON form.
"""

from kvferry.manifest.builder import ManifestBuilder
from kvferry.manifest.encoding import ENCODINGS, OPAQUE, encoding_of
from kvferry.manifest.manifest import Manifest
from kvferry.manifest.model import (
    BLOCK,
    ITEMSIZE,
    SLOT,
    Axis,
    Component,
    Group,
    ManifestError,
    ModelInfo,
    Region,
    Shard,
    TokenShard,
)

__all__ = [
    "BLOCK", "ENCODINGS", "ITEMSIZE", "OPAQUE", "SLOT", "Axis", "Component", "Group", "Manifest", "ManifestBuilder",
    "ManifestError", "ModelInfo", "Region", "Shard", "TokenShard", "encoding_of",
]  # fmt: skip
