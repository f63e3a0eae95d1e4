"""An engine of one rank as a process that a test may kill: `engine_process.py SOCKET ENGINE_ID EPOCH WORK REQUEST`.

WORK is publish (50 tokens of Kv.random(seed=1)), publish-partly (the first 20 of them), publish-behind-a-fence (which
its stream never reaches), receive, or lose-session (after a publish). Says "ready" when it has done so, then waits to
be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from lives import fences_of
from ranks import Blocks, Kv, Shape, start_rank

from kvferry.engine import EngineClient

SHAPE = Shape.tp(1, num_blocks=16)
BLOCKS = Blocks((3, 1, 4, 15), 9)


async def lose_session(client: EngineClient) -> None:
    """As where a connection to its daemon breaks."""
    assert client._session._pipe is not None
    client._session._pipe.abort()
    await client.closed.wait()


async def main(socket: str, engine_id: str, epoch: str, what: str, request_id: str) -> None:
    rank = await start_rank(engine_id, Path(socket), SHAPE, 0, epoch)
    SHAPE.write(0, rank.memory, Kv.random(50, seed=1), BLOCKS, (0, 50), True)
    if what == "receive":
        pending = asyncio.create_task(rank.client.receive(request_id, BLOCKS.tables()))
        await asyncio.sleep(0)
        assert not pending.done()
    elif what in ("publish", "lose-session"):
        await rank.client.publish(request_id, BLOCKS.tables(), 50, metadata=b"left behind")
        if what == "lose-session":
            await lose_session(rank.client)
    elif what == "publish-behind-a-fence":
        fences = await fences_of(rank)
        await rank.client.publish(request_id, BLOCKS.tables(), 50, after=fences.take())
    else:
        await rank.client.publish(request_id, BLOCKS.tables(), 20, more=True)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
