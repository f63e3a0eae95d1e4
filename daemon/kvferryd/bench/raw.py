"""The yardstick of kvferry: the same bytes, read with NIXL alone between two processes.

The best way NIXL has for a pool of equal blocks: one prepared list for each side, and indices. On host memory both
sides map the very regions of the daemons: the same physical pages, whose placement decides as much as anything else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import Deadline, PeerFailed
from kvferry.memory import SharedRegion, open_file_region
from kvferryd.bench.child import child, tell
from kvferryd.memory.cuda import CudaProvider
from kvferryd.transport.nixl import make_agent
from kvferryd.transport.read import Span

Indices = npt.NDArray[np.int32]
Requests = Sequence[tuple[Indices, Indices]]
READ_S = 20.0


@dataclass(slots=True)
class RawPair:
    """An initiator here over `local`, a target in a process of its own over `remote`."""

    agent: Any
    peer: str
    local: Span
    remote: Span

    def read(self, run_nbytes: int, source: Indices, destination: Indices) -> float:
        """Seconds to read blocks of `run_nbytes` from `source` to `destination` indices, request and wait included."""
        local = self._pool("NIXL_INIT_AGENT", self.local, run_nbytes)
        remote = self._pool(self.peer, self.remote, run_nbytes)
        began = time.perf_counter()
        handle = self.agent.make_prepped_xfer("READ", local, destination, remote, source)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
            if time.perf_counter() - began > READ_S:
                raise Deadline("deadline", f"NIXL did not end a read within {READ_S:g} s")
        seconds = time.perf_counter() - began
        if state != "DONE":
            raise PeerFailed("transport_failed", f"NIXL ended a read with {state}")
        for each in (handle, local, remote):
            each.release()
        return seconds

    def bursts(self, op: str, run_nbytes: int, requests: Requests, repeats: int) -> list[float]:
        """Seconds of each repeat: all requests (source, destination) posted, then all awaited; prepared once, before.

        op: READ from there to here, or WRITE from here to there.
        """
        local = self._pool("NIXL_INIT_AGENT", self.local, run_nbytes)
        remote = self._pool(self.peer, self.remote, run_nbytes)
        handles = [
            self.agent.make_prepped_xfer(op, local, destination, remote, source) for source, destination in requests
        ]
        try:
            return [self._burst(handles) for _ in range(repeats)]
        finally:
            for each in (*handles, local, remote):
                each.release()

    def _burst(self, handles: Sequence[Any]) -> float:
        began = time.perf_counter()
        states = [self.agent.transfer(handle) for handle in handles]
        for number, handle in enumerate(handles):
            while states[number] == "PROC":
                states[number] = self.agent.check_xfer_state(handle)
                if time.perf_counter() - began > READ_S:
                    raise Deadline("deadline", f"NIXL did not end {len(handles)} requests within {READ_S:g} s")
        if set(states) != {"DONE"}:
            raise PeerFailed("transport_failed", f"NIXL ended with {' and '.join(sorted(set(states)))}")
        return time.perf_counter() - began

    def _pool(self, agent: str, span: Span, run_nbytes: int) -> Any:
        count = span.nbytes // run_nbytes
        rows = np.array([(span.address, run_nbytes, span.device, run_nbytes, count)], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(agent, rows, span.memory_type)


@contextmanager
def target(where: str, nbytes: int) -> Iterator[dict[str, Any]]:
    """A target in a process of its own, over a shared file, or over new memory of a GPU ("cuda:0").

    Yields its `metadata` for `connected` and, of GPU memory, the IPC `handle`, both in hex, and its `span`.
    """
    with child("kvferryd.bench.raw", where, str(nbytes)) as told:
        yield told


@contextmanager
def connected(agent: Any, told: dict[str, Any], local: Span) -> Iterator[RawPair]:
    """The initiator `agent` over `local`, connected to a target; disconnected afterwards."""
    registered = agent.register_memory(_row(local), local.memory_type)
    peer = agent.add_remote_agent(bytes.fromhex(told["metadata"])).decode()
    yield RawPair(agent, peer, local, Span(**told["span"]))
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


@contextmanager
def raw_pair(source: SharedRegion, destination: SharedRegion) -> Iterator[RawPair]:
    """Start the target over `source`, connect to it from `destination`, and end it afterwards."""
    local = Span(destination.address, destination.nbytes, "host")
    with target(source.path, source.nbytes) as told:
        agent = make_agent("raw-initiator", threads=0)
        with connected(agent, told, local) as pair:
            yield pair


def _row(span: Span) -> npt.NDArray[np.uint64]:
    return np.array([(span.address, span.nbytes, span.device)], dtype=np.uint64)


def _serve(where: str, nbytes: int) -> None:
    handle = ""
    if where.startswith("cuda:"):
        provider = CudaProvider(where)
        owned = provider.allocate(nbytes)
        span, handle = owned.span, owned.told.cuda.handle.hex()
        with provider.device:  # UCX finds its GPU by the current context
            agent = _target_agent(span)
    else:
        shared = open_file_region(where, nbytes)
        span = Span(shared.address, nbytes, "host")
        agent = _target_agent(span)
    tell({"metadata": agent.get_agent_metadata().hex(), "span": asdict(span), "handle": handle})
    sys.stdin.read()  # until the initiator ends


def _target_agent(span: Span) -> Any:
    agent = make_agent("raw-target", threads=0)
    agent.register_memory(_row(span), span.memory_type)
    return agent


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
