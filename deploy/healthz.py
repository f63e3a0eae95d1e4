#!/opt/kvferry/bin/python
"""Exit 0 when the daemon of this container answers /healthz; found by the same variables and file as the daemon's own."""

import argparse
import asyncio
import sys

from kvferryd.ask import client
from kvferryd.config import reach


async def healthy() -> bool:
    async with client(reach(), argparse.Namespace(daemon=None)) as daemon:
        return await daemon.healthy()


sys.exit(0 if asyncio.run(healthy()) else 1)
