"""A router in miniature: orders one transfer from a daemon of the decode engine, waits for its end, prints its record.

    python examples/router.py DECODE_REST PREFILL_PEER [TOKEN]

DECODE_REST is the decode daemon's REST address (http://127.0.0.1:7420), PREFILL_PEER the prefill daemon's peer address
(127.0.0.1:7411), TOKEN what the daemon's `token_file` has, if it has one. examples/engine.py is the two engines.
"""

from __future__ import annotations

import asyncio
import sys

from kvferry import DaemonError, OrderBody, RouterClient, SourceBody


async def main(decode: str, prefill: str, token: str = "") -> None:
    async with RouterClient(decode, token=token) as daemon:
        source = SourceBody(engine_id="prefill", address=prefill)
        ordered = await daemon.order(OrderBody(request_id="req-1", source=source, deadline_ms=60_000))
        record = await daemon.wait(ordered.transfer_id, timeout_s=60)

    print(f"{record.request_id} is {record.state}: {record.bytes} bytes, {record.path}")
    if record.error is not None:
        sys.exit(f"{record.error.code}: {record.error.message} -> {record.error.remedy}")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except DaemonError as error:
        sys.exit(f"{error.code}: {error}")
