"""A NIXL agent and the thread that owns it.

The event loop hands over work and awaits futures; on host memory a read happens inside NIXL's post, and asking for a
read serves whatever else is on the wire of the agent. The one thing that the loop does itself is to post a small read
of host memory, a word most often, from a peer whose words arrive inside the post (one of this host), while the thread
is not in NIXL: the way to a thread and back takes longer. NIXL has neither abort nor timeouts: a read that was given up
goes on writing until NIXL says DONE or RemoteDisconnect for it, and `Read.quiet` tells when that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvferry.errors import KvferryError
from kvferry.memory import cuda
from kvferryd.aio import settle, submit, when_done
from kvferryd.observe import logs
from kvferryd.transport import ucx
from kvferryd.transport.metadata import Metadata
from kvferryd.transport.nixl import make_agent, rehearse
from kvferryd.transport.read import Descriptors, Read, Reads, Span, TransportError, post, typed

log = logs.get(__name__)
T = TypeVar("T")

CLOSE_S = 5.0
FETCH_PRIORITY = 1 << 20
SCRATCH = 8192
"""Words that can be fetched at once, ahead of all other reads."""
WORD = 8
ATTEND_S, ATTEND_POLL_S = 0.25, 1e-3
"""NIXL's own thread looks for a new reader every 10 ms, and a reader connects in several steps: after a handshake ours
looks more often, for so long."""
QUICK_ROWS, QUICK_NBYTES = 256, 1 << 20
"""The most that the loop posts itself: 0.2 to 0.4 ms."""


class Agent:
    """Owns a NIXL agent and its thread. Close it with `close`: that is also the only sure fence for a lost read."""

    def __init__(self, name: str, *, threads: int = 0, device: cuda.Device | None = None) -> None:
        """`device`: the GPU whose memory the agent registers; None for host memory alone."""
        self.name, self.device = name, device
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._reads = Reads()
        self._in_nixl = threading.Lock()
        """The loop does not wait for it."""
        self._near: set[str] = set()
        """Peers whose last word arrived inside the post."""
        self._registered: dict[Span, Any] = {}
        self._peers: dict[str, int] = {}
        """Users of each loaded peer, by alias."""
        self._unused: set[str] = set()
        """Names without users: unloaded when no read from them is under way."""
        self._closed = self._gone = False
        self._attend_until = 0.0
        self.broken = ""
        """Why the thread has ended without being told to."""
        self._scratch = np.zeros(SCRATCH, dtype=np.uint64)
        self._free = list(range(SCRATCH))
        self._peeks: dict[str, list[tuple[int, asyncio.Future[int]]]] = {}
        """Words that are asked for in this turn of the loop, by peer: their addresses, and who waits."""
        self.listens_at: tuple[str, ...] = ()
        """The addresses at which UCX listens for it: those that its interfaces had as it started."""
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)
        self._nixl: Any = None
        self._landing: Span | None = None
        """GPU memory of the agent's own, where the first read from a peer ends."""

    async def start(self) -> None:
        """Make the NIXL agent (about 0.4 s, on its thread). Raises KvferryError."""
        self._thread.start()
        await self._call(self._start)

    def _start(self) -> None:
        if self.device is not None:
            self.device.bind()  # UCX looks at whatever context is current in the thread that calls it
        self._nixl = make_agent(self.name, threads=self._threads)
        self.listens_at = tuple(ucx.listens_at())
        self._register(Span(self._scratch.ctypes.data, self._scratch.nbytes, "host"))
        if self.device is not None:
            self._landing = Span(self.device.alloc(cuda.GRANULE), cuda.GRANULE, "cuda", self.device.index)
            self._register(self._landing)

    async def register(self, *spans: Span) -> bytes:
        """Register memory with NIXL, all of it or none. Few and large: metadata and peers' set-up grow with each.

        Returns what a peer needs to read from this agent now: a bearer capability, for authenticated peers only.
        """
        return await self._call(lambda: self._register_all(spans))

    def _register_all(self, spans: Sequence[Span]) -> bytes:
        try:
            for span in spans:
                self._register(span)
            return bytes(self._nixl.get_agent_metadata())
        except Exception:
            for span in spans:
                if (registered := self._registered.pop(span, None)) is not None:
                    self._nixl.deregister_memory(registered)
            raise

    def _register(self, span: Span) -> None:
        self._registered[span] = self._nixl.register_memory(span.row(), span.memory_type)

    def rehearse(self) -> None:
        """Soon, on the thread: what makes the first connection to a peer slower than the next."""
        self._hand_over(self._rehearse)

    def _rehearse(self) -> None:
        try:
            if self._nixl is not None:
                rehearse(self._nixl, Span(self._scratch.ctypes.data, WORD, "host").row(1))
        except Exception as error:  # noqa: BLE001  the first connection is slower then
            log.warning("the first connection was not rehearsed", agent=self.name, error=str(error))

    def attend(self) -> None:
        """A reader will connect now: be quick to answer."""
        self._attend_until = time.monotonic() + ATTEND_S
        self._hand_over(lambda: None)  # wake the thread

    async def add_peer(self, peer: Metadata) -> None:
        """Load a peer, from then on known by its alias; `remove_peer` as often as this was called."""
        await self._call(lambda: self._add_peer(peer))

    def _add_peer(self, peer: Metadata) -> None:
        if peer.alias not in self._peers:
            try:
                self._nixl.add_remote_agent(peer.blob)
            except Exception:
                with contextlib.suppress(Exception):  # parts that were loaded before it failed; often none
                    self._nixl.remove_remote_agent(peer.alias)
                raise
        self._peers[peer.alias] = self._peers.get(peer.alias, 0) + 1
        self._unused.discard(peer.alias)

    async def remove_peer(self, alias: str) -> None:
        """The last of these unloads the peer, as soon as all reads from it are quiet. An agent that is closed, or that
        closes meanwhile, has unloaded every peer."""
        await submit(self._hand_over, lambda: self._remove_peer(alias), lambda error: typed(error, self.name))

    def _remove_peer(self, alias: str) -> None:
        if self._nixl is None:
            return
        self._peers[alias] -= 1
        if not self._peers[alias]:
            self._unused.add(alias)
            self._unload()

    def _unload(self) -> None:
        """Not while reads from it are under way: NIXL would never report their end."""
        for alias in list(self._unused):
            if not self._reads.any_from(alias):
                del self._peers[alias]
                self._unused.discard(alias)
                self._near.discard(alias)
                try:
                    self._nixl.remove_remote_agent(alias)
                except Exception as error:  # noqa: BLE001  nobody waits for it
                    log.warning("a peer could not be unloaded", agent=self.name, peer=alias, error=str(error))

    async def warm(self, peer: str, span: Span) -> None:
        """Read one byte of a peer's memory: the first read to a peer pays 5 to 15 ms of wire-up."""
        landing = self._landing
        if landing is None:
            await self._fetch(peer, span, 1)
        else:  # into GPU memory, as the reads to come: host memory would be wired up otherwise
            types = landing.memory_type, span.memory_type
            await self.read(peer, landing.row(1), span.row(1), *types, FETCH_PRIORITY).done

    async def peek(self, peer: str, address: int, *, alone: bool = True) -> int:
        """A word (8 bytes) of a peer's registered host memory. Raises TransportError.

        alone: do not wait for others; otherwise it is read with all that are asked for in the same turn of the loop.
        """
        if alone:
            return await self._fetch(peer, Span(address, WORD, "host"), WORD)
        peeks = self._peeks.setdefault(peer, [])
        if not peeks:
            self._loop.call_soon(self._peek_all, peer)
        word: asyncio.Future[int] = self._loop.create_future()
        peeks.append((address, word))
        return await word

    def _peek_all(self, peer: str) -> None:
        """Read the words that were asked for together."""
        peeks = self._peeks.pop(peer)
        for first in range(0, len(peeks), QUICK_ROWS):
            self._peek_some(peer, peeks[first : first + QUICK_ROWS])

    def _peek_some(self, peer: str, peeks: list[tuple[int, asyncio.Future[int]]]) -> None:
        if len(self._free) < len(peeks):
            for _, word in peeks:
                settle(word, error=_too_many())
            return
        indices = [self._free.pop() for _ in peeks]
        self._scratch[indices] = 0
        local, remote = (np.zeros((len(peeks), 3), dtype=np.uint64) for _ in range(2))
        local[:, 0] = self._scratch.ctypes.data + WORD * np.array(indices, dtype=np.uint64)
        remote[:, 0] = [address for address, _ in peeks]
        local[:, 1] = remote[:, 1] = WORD
        read = self.read(peer, local, remote, "DRAM", "DRAM", FETCH_PRIORITY)

        def arrived(done: asyncio.Future[None]) -> None:
            problem = done.exception()
            assert problem is None or isinstance(problem, KvferryError)
            for (_, word), index in zip(peeks, indices, strict=True):
                settle(word, int(self._scratch[index]), error=problem)
            when_done(read.quiet, lambda _: self._free.extend(indices))  # as in `_fetch`

        when_done(read.done, arrived)

    async def _fetch(self, peer: str, span: Span, nbytes: int) -> int:
        if not self._free:
            raise _too_many()
        index = self._free.pop()
        self._scratch[index] = 0
        local = Span(self._scratch.ctypes.data + WORD * index, nbytes, "host")
        read = self.read(peer, local.row(), span.row(nbytes), "DRAM", span.memory_type, FETCH_PRIORITY)
        try:
            await read.done
            if read.at_once and peer in self._peers:
                self._near.add(peer)
            return int(self._scratch[index])
        finally:  # free when its value has been taken and nothing writes to it any more
            read.quiet.add_done_callback(lambda _: self._free.append(index))

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, local_type: str, remote_type: str, priority: int = 0
    ) -> Read:
        """Start reading `remote` into `local`, row by row; equal lengths in each row. Higher priority goes first."""
        done, quiet = self._loop.create_future(), self._loop.create_future()
        read = Read(peer, local, remote, local_type, remote_type, priority, done, quiet)
        if self._closed:
            self._end(read)
        elif not self._read_at_once(read):
            self._hand_over(lambda: self._begin(read))
        return read

    async def close(self) -> bool:
        """Destroy the agent: every read ends here. Whether the thread has stopped within CLOSE_S: until it has,
        the registered memory may still be written."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
        return not self._thread.is_alive()

    async def _call(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise self._closed_error()
        return await submit(self._hand_over, work, lambda error: typed(error, self.name))

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)
        if self._gone:
            self._empty_inbox()

    def _read_at_once(self, read: Read) -> bool:
        """Post a small read from here. Should it not arrive inside the post, the thread asks for it."""
        if read.peer not in self._near or len(read.local) > QUICK_ROWS or read.nbytes > QUICK_NBYTES:
            return False
        if not read.local_type == read.remote_type == "DRAM" or not self._in_nixl.acquire(blocking=False):
            return False
        try:
            if self._nixl is None:
                return False
            post(self._nixl, read)
            self._reads.begin(read)  # it may be finished already
        finally:
            self._in_nixl.release()
        if not read.at_once:
            self._near.discard(read.peer)
            self._hand_over(lambda: None)  # wake the thread
        return True

    # ---- on the thread ----

    def _run(self) -> None:
        try:
            while True:
                try:
                    work = self._inbox.get(block=True, timeout=self._patience())
                except queue.Empty:
                    work = self._advance
                if work is None:
                    break
                with self._in_nixl:
                    work()
        except Exception as error:
            log.exception("the NIXL thread broke", agent=self.name)
            self._closed, self.broken = True, f"{type(error).__name__}: {error}"
        self._destroy()

    def _patience(self) -> float | None:
        patience = self._reads.patience()
        if time.monotonic() >= self._attend_until:
            return patience
        return ATTEND_POLL_S if patience is None else min(patience, ATTEND_POLL_S)

    def _advance(self) -> None:
        self._reads.advance(self._nixl)
        if time.monotonic() < self._attend_until:
            self._nixl.get_new_notifs()  # there are none: asking for them serves who connects
        if self._unused:
            self._unload()

    def _begin(self, read: Read) -> None:
        if self._nixl is None:
            self._end(read)
        else:
            self._reads.begin(read)

    def _destroy(self) -> None:
        """Tell all work, under way or waiting, of the end."""
        with self._in_nixl:
            nixl, self._nixl = self._nixl, None
            if nixl is not None:
                for registered in self._registered.values():
                    try:
                        nixl.deregister_memory(registered)
                    except Exception as error:  # noqa: BLE001  the agent goes all the same
                        log.warning("memory could not be deregistered", agent=self.name, error=str(error))
            self._registered.clear()
            ended = self._reads.drain()  # their handles hold on to the agent as well
            del nixl  # before any read is called quiet: this is the fence
        landing, self._landing = self._landing, None
        if self.device is not None and landing is not None:
            try:
                self.device.free(landing.address)
            except KvferryError as error:  # a broken context: the reads are ended all the same
                log.warning("GPU memory could not be freed", agent=self.name, error=str(error))
        for read in ended:
            self._end(read)
        self._gone = True  # first: from now on a caller that puts work in takes it out itself
        self._empty_inbox()

    # ---- on either ----

    def _empty_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._inbox.get_nowait()
                if work is not None:
                    work()

    def _end(self, read: Read) -> None:
        settle(read.quiet)
        settle(read.done, error=self._closed_error())

    def _closed_error(self) -> TransportError:
        return TransportError("agent_closed", f"the NIXL agent {self.name} is closed")


def _too_many() -> TransportError:
    return TransportError("transport_failed", f"{SCRATCH} words are being read already", value=SCRATCH)
