"""A peer's metadata is loaded in another process first, one that may die of it.

UCX reads the addresses and keys inside without checking a single length, and connects to whatever they name, for
minutes where nobody answers. Of random mutations that are well-formed to NIXL one in a hundred ends the process that
loads or first uses them (tests/faults/test_hostile_metadata.py). What passes here has been loaded, connected and read
from once.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvferryd.transport.binding import make_agent
from kvferryd.transport.metadata import Metadata
from kvferryd.transport.read import Descriptors, Span, TransportError

READY, FINE = "ready", "fine"
READ_S = 5.0
POLL_S = 1e-3


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
                async with asyncio.timeout(timeout_s):
                    answer = await _ask(process, metadata, spans)
            except TimeoutError:
                raise TransportError("peer_unreachable", "NIXL did not connect to the peer", value=timeout_s) from None
            finally:
                if answer != FINE:
                    await self.close()  # what a failed load leaves behind in it is nobody's concern
        if not answer:
            raise TransportError(
                "malformed_metadata",
                "the process that tried the peer's NIXL metadata died of it",
                field="agent_metadata",
                remedy="check that the peer is a kvferry daemon with the same NIXL",
            )
        if answer != FINE:
            raise TransportError(
                "transport_failed",
                f"NIXL failed: {answer}",
                field="nixl",
                value=answer,
                remedy="the daemon's stderr has NIXL's own message",
            )

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, json.dumps(self._ucx),
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


async def _ask(process: asyncio.subprocess.Process, metadata: Metadata, spans: Sequence[Span]) -> str:
    """Its answer; empty where it died."""
    assert process.stdin is not None and process.stdout is not None
    host = [(span.address, 1, 0) for span in spans if span.kind == "host"]
    try:
        process.stdin.write(json.dumps([metadata.alias, metadata.blob.hex(), host]).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return ""
    return (await process.stdout.readline()).decode().strip()


def main() -> None:
    """The process: a question per line of stdin, an answer per line of what stdout was. Ends with its stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its daemon's terminal is its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NIXL writes to stdout
    agent = make_agent(f"screen-{os.getpid()}", threads=0, ucx=json.loads(sys.argv[1]))
    landing = np.zeros(1, dtype=np.uint8)
    own = np.array([(landing.ctypes.data, 1, 0)], dtype=np.uint64)
    agent.register_memory(own, "DRAM")
    answers.write(f"{READY}\n")
    for line in sys.stdin:
        alias, blob, rows = json.loads(line)
        try:
            agent.add_remote_agent(bytes.fromhex(blob))
            for row in rows:
                _read(agent, alias, own, np.array([row], dtype=np.uint64))
            agent.remove_remote_agent(alias)
        except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
            answers.write(f"{type(error).__name__} {error}".replace("\n", " ") + "\n")
        else:
            answers.write(f"{FINE}\n")


def _read(nixl: Any, alias: str, own: Descriptors, far: Descriptors) -> None:
    handle = nixl.initialize_xfer("READ", nixl.get_xfer_descs(own, "DRAM"), nixl.get_xfer_descs(far, "DRAM"), alias)
    state, deadline = nixl.transfer(handle), time.monotonic() + READ_S
    while state == "PROC" and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = nixl.check_xfer_state(handle)
    if state != "DONE":
        raise TimeoutError(f"a first read ended in {state}")
    nixl.release_xfer_handle(handle)


if __name__ == "__main__":
    main()
