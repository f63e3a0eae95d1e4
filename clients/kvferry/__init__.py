"""kvferry: the light client of the KV-cache transfer daemon.

An engine describes its cache (`ManifestBuilder`) and speaks to the daemon beside it (`EngineClient`, or from threads
`BlockingEngineClient`); a router speaks to daemons over REST (`RouterClient`). Each name is imported when it is used:
`import kvferry` alone loads nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from kvferry.blocking import BlockingEngineClient, BlockingLease
    from kvferry.engine import EngineClient, Lease, Received, TransferFailed, Unsettled
    from kvferry.errors import KvferryError
    from kvferry.manifest import Manifest, ManifestBuilder, ManifestError, ModelInfo, Shard, TokenShard
    from kvferry.memory import CudaRegion, SharedRegion, cuda_memory, memfd_region, torch_pool
    from kvferry.router import DaemonError, RouterClient
    from kvferry.schemas import LeaseState, OrderBody, SourceBody, TransferState
    from kvferry.tables import BlockTable

_HOMES = {
    "blocking": ["BlockingEngineClient", "BlockingLease"],
    "engine": ["EngineClient", "Lease", "Received", "TransferFailed", "Unsettled"],
    "errors": ["KvferryError"],
    "manifest": ["Manifest", "ManifestBuilder", "ManifestError", "ModelInfo", "Shard", "TokenShard"],
    "memory": ["CudaRegion", "SharedRegion", "cuda_memory", "memfd_region", "torch_pool"],
    "router": ["DaemonError", "RouterClient"],
    "schemas": ["LeaseState", "OrderBody", "SourceBody", "TransferState"],
    "tables": ["BlockTable"],
}
__all__ = [
    "BlockTable", "BlockingEngineClient", "BlockingLease", "CudaRegion", "DaemonError", "EngineClient", "KvferryError",
    "Lease", "LeaseState", "Manifest", "ManifestBuilder", "ManifestError", "ModelInfo", "OrderBody",
    "Received", "RouterClient", "Shard", "SharedRegion", "SourceBody", "TokenShard",
    "TransferFailed", "TransferState", "Unsettled", "cuda_memory", "memfd_region", "torch_pool",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"kvferry.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _version() -> str:
    """As it is installed. A checkout on PYTHONPATH has none: `0.0`, as a build without git."""
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version("kvferry"))
    except metadata.PackageNotFoundError:
        return "0.0"
