"""An engine with one small component in host memory, for scripts that publish by hand."""

from __future__ import annotations

from kvferry.blocking import BlockingEngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo, Shard

BLOCK, BLOCKS = 16, 16


def attached(socket: str, group: str) -> BlockingEngineClient:
    """To the daemon at `socket`, its cache registered."""
    client = BlockingEngineClient.connect(socket, engine_id="p", epoch="1")
    region = client.allocate(BLOCKS * BLOCK * 64)
    rows = region.array().reshape(BLOCKS, BLOCK, 2, 32)
    builder = ManifestBuilder("p", "1", ModelInfo(name="m", fingerprint="f"))
    builder.region(0, "host", nbytes=region.nbytes, address=region.address)
    builder.group(group, block_size=BLOCK, num_blocks=BLOCKS)
    axes, heads = ("block", "slot", "head", "dim"), Shard(axis="head", start=0, total=2)
    builder.component(group, layer=0, name="k", array=rows, axes=axes, shard=heads, encoding="uint8")
    client.register(builder.build())
    return client
