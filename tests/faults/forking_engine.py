"""An engine that publishes a request and has forked a helper: `forking_engine.py SOCKET ENGINE_ID EPOCH REQUEST`.

Prints the helper's process id. The helper keeps copies of all descriptors, gRPC's socket among them, and does nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from engine_process import BLOCKS, SHAPE
from ranks import Kv, start_rank


async def main(socket: str, engine_id: str, epoch: str, request_id: str) -> None:
    rank = await start_rank(engine_id, Path(socket), SHAPE, 0, epoch)
    SHAPE.write(0, rank.memory, Kv.random(50, seed=1), BLOCKS, (0, 50), True)
    await rank.client.publish(request_id, BLOCKS.tables(), 50)
    helper = os.fork()
    if not helper:
        os.close(1)  # or who reads the line below would wait for this process too
        signal.pause()
        os._exit(0)
    print(helper, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
