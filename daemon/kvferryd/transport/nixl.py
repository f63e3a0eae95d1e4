"""The NIXL binding itself: which build, and an agent made with the options that were measured to be best."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from kvferry.errors import KvferryError, Unavailable

# The meta package `nixl` imports torch to choose a build (1.6 s, 220 MB); the builds themselves take 0.06 s.
BUILDS = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
PROGRESS_DELAY_US = 10_000
CUDA_13 = 13000
FIRST_READ_S, POLL_S = 5.0, 1e-3
_swap = threading.Lock()


def keep_no_mappings() -> None:
    """For a process that holds open what it reads of peers' GPU memory; before NIXL is loaded. An operator's own value
    stays.

    UCX gives up a mapping that it has cached only when the process ends (openucx/ucx 11753): what a daemon that died
    had taken of its GPU would stay taken for as long as its readers live.
    """
    os.environ.setdefault("UCX_CUDA_IPC_CACHE", "n")


def load() -> Any:
    """The NIXL build for this machine's driver that imports. Raises KvferryError (`nixl_missing`)."""
    # UCX takes memory that it did not see allocated for host memory, and it does not see IPC mappings being opened:
    # without its cache it asks the driver. The variable is of the process, not of a context, and read when UCX is
    # loaded.
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
    older = _driver_version() in range(1, CUDA_13)
    for name in (BUILDS[1], BUILDS[0], BUILDS[2]) if older else BUILDS:
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        _end_without_destructors()
        return found
    raise missing(older=older)


def missing(*, older: bool = False) -> KvferryError:
    """older: the driver is one for CUDA 12."""
    cuda = "12" if older else "13"
    remedy = f"pip install --no-deps nixl-cu{cuda}, or beside a GPU, with torch, pip install 'kvferry[cuda{cuda}]'"
    return Unavailable("nixl_missing", "NIXL is not installed", field="nixl", value=", ".join(BUILDS), remedy=remedy)


@functools.cache
def _end_without_destructors() -> None:
    """Let the process end, when Python is done, before the libraries that are loaded by now are unloaded.

    NIXL's wheels bring a libnl; where the system has libibverbs, as beside RDMA, UCX loads the system's too, and the
    two crash in each other's destructors. A daemon that stopped well would have ended with SIGSEGV.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


def make_agent(name: str, *, threads: int) -> Any:
    """A nixl_agent with the UCX backend, no listen thread, and a progress thread that sleeps.

    The Python wrapper fixes pthrDelay to 0, which spins one core per agent and halves the rate of scattered reads. So
    its binding is wrapped for the moment of construction.
    """
    api = load()
    binding = api.nixlBind

    class WithDelay:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(binding, attribute)

        @staticmethod
        def nixlAgent(agent_name: str, config: Any) -> Any:  # noqa: N802
            config.pthrDelay = PROGRESS_DELAY_US
            return binding.nixlAgent(agent_name, config)

    # Our thread alone drives the agent, but NIXL's progress thread runs beside it: its default is no locking.
    config = api.nixl_agent_config(backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW)
    with _swap:
        api.nixlBind = WithDelay()
        try:
            agent = api.nixl_agent(name, config)
        finally:
            api.nixlBind = binding
    options = {"ucx_error_handling_mode": "peer"}
    if threads:
        options["num_threads"] = str(threads)
    agent.create_backend("UCX", options)
    return agent


def rehearse(agent: Any, own: Any) -> None:
    """Let the agent connect to another one of this process and read from it: the first connection that an agent makes
    takes 30 to 60 ms more than the next, and its first read 20. `own`: one byte that it has registered, as a row."""
    name = f"rehearsal-{uuid.uuid4().hex}"
    partner = make_agent(name, threads=0)
    held = partner.register_memory(own, "DRAM")
    agent.add_remote_agent(bytes(partner.get_agent_metadata()))
    try:
        reads, deadline = FirstReads(agent, own, name, [own]), time.monotonic() + FIRST_READ_S
        while not reads.over():
            if time.monotonic() >= deadline:
                raise TimeoutError("a first read does not arrive")
            time.sleep(POLL_S)
    finally:
        agent.remove_remote_agent(name)
        partner.deregister_memory(held)


class FirstReads:
    """Reads of a peer's host memory, a byte of each row, posted at once; nobody waits for them. `own`: where they land.
    Raises NIXL's own errors."""

    def __init__(self, agent: Any, own: Any, peer: str, rows: Sequence[Any]) -> None:
        self._agent, self._under_way = agent, list[tuple[Any, str]]()
        for row in rows:
            descs = agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(row, "DRAM")
            handle = agent.initialize_xfer("READ", *descs, peer)
            self._under_way.append((handle, agent.transfer(handle)))

    def over(self) -> bool:
        """Whether all have arrived by now. Raises RuntimeError where one has failed."""
        left = []
        for handle, posted in self._under_way:
            state = posted if posted == "DONE" else self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
            elif state == "PROC":
                left.append((handle, state))
            else:
                raise RuntimeError(f"a first read ended in {state}")
        self._under_way = left
        return not left


def _driver_version() -> int:
    """The CUDA version that the driver supports, 1000 x major + 10 x minor; 0 where there is no driver."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return 0
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
