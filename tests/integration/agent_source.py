"""A process whose agent others read from: one page of words, each its own index. Ends when stdin does."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from kvferryd.transport.agent import Agent
from kvferryd.transport.read import Span


async def main(name: str) -> None:
    agent = Agent(name)
    await agent.start()
    words = np.arange(1 << 20, dtype=np.uint64)
    metadata = await agent.register(Span(words.ctypes.data, words.nbytes, "host"))
    print(json.dumps([words.ctypes.data, words.nbytes, metadata.hex()]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await agent.close()


asyncio.run(main(sys.argv[1]))
