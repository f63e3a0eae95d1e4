"""A peer's metadata is loaded in another process first, one that may die of it.

UCX reads the addresses and keys inside without checking a single length, and connects to whatever they name, for
minutes where nobody answers. Of random mutations that are well-formed to NIXL one in a hundred ends the process that
loads or first uses them (tests/faults/test_hostile_metadata.py). What passes here has been loaded, connected and read
from once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence

from kvferryd import screening
from kvferryd.screening import FINE, READY
from kvferryd.transport.metadata import Metadata, malformed
from kvferryd.transport.read import Span, TransportError, nixl_failed


class Screen:
    """Owns the process: started when it is first needed, again when it has died, ended by `close`."""

    def __init__(self, ucx: Mapping[str, str]) -> None:
        self._ucx = dict(ucx)
        self._one_at_a_time = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def check(self, metadata: Metadata, spans: Sequence[Span], timeout_s: float) -> None:
        """Load it and read a byte of each span of host memory.

        Raises TransportError: `malformed_metadata` where the process died of it, `peer_unreachable` where it did not
        answer in time, `transport_failed` with what NIXL said.
        """
        async with self._one_at_a_time:
            answer = ""
            try:
                process = self._process or await self._start()
                assert process.stdin is not None and process.stdout is not None
                host = [(span.address, 1, 0) for span in spans if span.kind == "host"]
                asked = json.dumps([metadata.alias, metadata.blob.hex(), host]).encode() + b"\n"
                async with asyncio.timeout(timeout_s):
                    with contextlib.suppress(ConnectionError):  # it has died
                        process.stdin.write(asked)
                        await process.stdin.drain()
                        answer = (await process.stdout.readline()).decode().strip()
            except TimeoutError:
                raise TransportError("peer_unreachable", "NIXL did not connect to the peer", value=timeout_s) from None
            finally:
                if answer != FINE:
                    await self.close()  # what a failed load leaves behind in it is nobody's concern
        if not answer:
            raise malformed("the process that tried it died of it")
        if answer != FINE:
            raise nixl_failed(answer, answer)

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", screening.__name__, json.dumps(self._ucx),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"UCX_HANDLE_ERRORS": "none"},
        )  # fmt: skip
        assert process.stdout is not None
        if (await process.stdout.readline()).decode().strip() != READY:
            raise TransportError("transport_failed", "the process that tries peers' metadata did not start")
        return process

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
