#!/opt/kvferry/bin/python
"""Exit 0 when the daemon of this container answers /healthz. It is found by the daemon's own settings."""

import argparse
import asyncio
import sys

from kvferryd.commands.ask import client
from kvferryd.config import reach


async def healthy() -> bool:
    async with client(reach(), argparse.Namespace(daemon=None)) as daemon:
        return await daemon.healthy()


sys.exit(0 if asyncio.run(healthy()) else 1)
