"""The handover socket: open files, which gRPC cannot carry, go from an engine to its daemon or back, for a ticket.

An engine gives files and names their ticket in a call; a call names the ticket of files that the engine may fetch.
Daemons that share a folder fetch from each other in the same way, and give nothing.

Every file is closed: by the taker of its ticket, or after HELD_S when nobody has taken it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from kvferry.errors import Forbidden, KvferryError, Malformed, NotFound, Unavailable
from kvferry.file import File
from kvferry.memory.handover import LENGTH_NBYTES, MAX_FILES, MAX_MESSAGE, framed, too_many_files
from kvferry.pipe import Pipe
from kvferry.process import Process, credentials
from kvferry.v1 import engine_pb2
from kvferry.wire import problem_to_proto
from kvferryd.aio import Tasks
from kvferryd.memory import Files
from kvferryd.observe import logs

log = logs.get(__name__)
EXCHANGE_S, HELD_S, BREATH_S = 2.0, 5.0, 0.1
MAX_CONNECTIONS, BACKLOG = 16, 128


@dataclass(slots=True)
class _Held:
    files: Files
    offered: bool
    """The other end may fetch them: they are the daemon's. Otherwise it has handed them over, for a call."""
    expiry: asyncio.TimerHandle


@dataclass(slots=True)
class _Place:
    """A socket of mode 0600 in the file system: at `made_at` until it listens, then at `path`."""

    path: Path
    made_at: Path
    _made: os.stat_result | None = None

    def listen(self) -> socket.socket:
        """Raises OSError."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.setblocking(False)
            before = os.umask(0o177)
            try:
                listening.bind(str(self.made_at))
            finally:
                os.umask(before)
            listening.listen(BACKLOG)
            os.rename(self.made_at, self.path)
            self._made = self.path.stat()
        except BaseException:
            listening.close()
            if self.made_at != self.path:
                self.made_at.unlink(missing_ok=True)
            raise
        return listening

    def holds(self) -> bool:
        """Whether what was made is there."""
        with suppress(OSError):
            return self._made is not None and os.path.samestat(self.path.lstat(), self._made)
        return False


class Handovers:
    """`introduce` takes the process that holds a session; it raises KvferryError for a session that is not open.
    `pipe` gives the pipe that the session has from now on, and raises KvferryError where it has one. Without both it is
    a socket for peers."""

    def __init__(
        self, introduce: Callable[[str, Process | None], None] | None = None,
        pipe: Callable[[str], Pipe] | None = None, *, most: int = MAX_FILES,
    ) -> None:  # fmt: skip
        """most: files that are held for a session at once."""
        self._most = most
        self._introduce, self._pipe = introduce, pipe
        self._held: dict[str, dict[str, _Held]] = defaultdict(dict)
        """Keyed by session, then ticket."""
        self._place: _Place | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._exchanges = Tasks()
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    def take(self, session: str, ticket: str, *, offered: bool = False) -> Files:
        """Files that the engine of this session has handed over, or with `offered` those that it fetches. The caller's
        from now on. Raises KvferryError (`unknown_ticket`)."""
        held = self._held.get(session, {}).get(ticket)
        if held is None or held.offered is not offered:
            raise NotFound(
                "unknown_ticket",
                f"no files are held for this session under the ticket; files are held for {HELD_S:g} s",
                field="ticket", value=ticket, remedy="hand the files over again and name the ticket at once",
            )  # fmt: skip
        return self._let_go(session, ticket).files

    @asynccontextmanager
    async def serving(self, path: Path, made_at: Path | None = None) -> AsyncIterator[None]:
        """Listen on a socket of mode 0600, which is removed at the end, with every file that is still held. made_at:
        its path until it listens. Raises OSError."""
        self._place = _Place(path, made_at or path)
        self._listen(self._place)
        try:
            yield
        finally:
            with suppress(FileNotFoundError):  # somebody has removed it
                os.unlink(path)
            tasks = [*filter(None, [self._accepting]), *self._exchanges]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=EXCHANGE_S)
            for session in list(self._held):
                self.withdraw(session)

    def listen_again(self) -> None:
        """Where somebody has removed the socket, or has put another file in its place. Raises OSError."""
        if self._place is not None and not self._place.holds():
            self._listen(self._place)

    def _listen(self, place: _Place) -> None:
        listening, before = place.listen(), self._accepting
        if before is not None:
            before.cancel()
        self._accepting = asyncio.create_task(self._accept(listening))
        self._accepting.add_done_callback(lambda _: listening.close())

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(listening)
            except asyncio.CancelledError:
                self._places.release()
                raise
            except OSError as error:  # no descriptor is left: there is no event to wait for
                log.warning("handover not accepted", error=str(error))
                self._places.release()
                await asyncio.sleep(BREATH_S)
                continue
            connection.setblocking(False)
            self._exchanges.spawn(self._exchange(connection))

    async def _exchange(self, connection: socket.socket) -> None:
        files, pipe, own, loop = Files(), None, None, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(EXCHANGE_S):
                giving = Files()
                try:
                    told = await self._told(connection, files)
                    if told.pipe and self._pipe is not None:
                        own = connection.dup()  # first: what fails here leaves the session without a pipe
                        pipe = self._pipe(told.session)
                    reply, giving = self._reply(told, files)
                except KvferryError as error:
                    reply = engine_pb2.HandoverReply(problem=problem_to_proto(error))
                with giving as numbers:  # a new connection has room for so few bytes: this does not block
                    sent = socket.send_fds(connection, [answer := framed(reply)], numbers)
                if sent < len(answer):  # to send nothing fails, too, when the engine has closed its end
                    await loop.sock_sendall(connection, answer[sent:])
                if pipe is not None and own is not None:
                    connected = pipe
                    transport, _ = await loop.connect_accepted_socket(lambda: connected, own)
                    pipe = own = None
                    connected.begin(transport)
        except (TimeoutError, OSError) as error:
            log.debug("handover not finished", error=str(error) or "it took too long")
        finally:
            if pipe is not None:
                pipe.abort()
            if own is not None:
                own.close()
            files.close()  # without a ticket
            connection.close()
            self._places.release()

    async def _told(self, connection: socket.socket, files: Files) -> engine_pb2.Handover:
        """The Handover that came, with its files, from the engine's process."""
        _, uid, _ = credentials(connection)
        if uid not in (os.geteuid(), 0):
            raise Forbidden(
                "wrong_user", f"files are taken from user {os.geteuid()} and root only", field="uid", value=uid,
                remedy="run the engine as the user of its daemon",
            )  # fmt: skip
        try:
            told = engine_pb2.Handover.FromString(await _receive(connection, files))
        except DecodeError:
            raise _malformed("it is no Handover") from None
        if told.files != len(files.numbers) or bool(told.files) + bool(told.ticket) + told.pipe > 1:
            raise _malformed(f"{len(files.numbers)} files came, {told.files} were announced")
        if self._introduce is not None:
            self._introduce(told.session, Process.at(connection))
        elif not told.ticket:
            raise _malformed("peers fetch files here, and give none")
        return told

    def _reply(self, told: engine_pb2.Handover, files: Files) -> tuple[engine_pb2.HandoverReply, Files]:
        """(the answer, what goes with it)"""
        if told.ticket:
            return engine_pb2.HandoverReply(), self.take(told.session, told.ticket, offered=True)
        if not told.files:
            return engine_pb2.HandoverReply(), Files()
        return engine_pb2.HandoverReply(ticket=self._hold(told.session, files, offered=False)), Files()

    def offer(self, session: str, files: Sequence[File]) -> str:
        """A ticket with which the engine of this session, or a peer that was told of it, fetches copies of the files,
        once. Raises KvferryError (`too_many_files`, `handover_failed`)."""
        copies = Files()
        try:
            for file in files:
                copies.numbers.append(os.dup(file.fileno()))
            return self._hold(session, copies, offered=True)
        except OSError as error:
            why, remedy = f"the daemon cannot hand over another file: {error}", "raise its limit of open files"
            raise Unavailable("handover_failed", why, field="files", value=len(files), remedy=remedy) from None
        finally:
            copies.close()

    def _hold(self, session: str, files: Files, *, offered: bool) -> str:
        """A ticket for files, which are closed if nobody takes them with it. They stay the caller's where it raises
        KvferryError (`too_many_files`)."""
        held = sum(len(each.files.numbers) for each in self._held.get(session, {}).values())
        if (count := held + len(files.numbers)) > self._most:
            raise too_many_files(count)
        ticket = secrets.token_urlsafe(16)
        expiry = asyncio.get_running_loop().call_later(HELD_S, self._expire, session, ticket)
        self._held[session][ticket] = _Held(files.moved(), offered, expiry)
        return ticket

    def withdraw(self, session: str) -> None:
        """The files that are held for a session are closed. Idempotent."""
        for ticket in list(self._held.get(session, ())):
            self._expire(session, ticket)

    def _expire(self, session: str, ticket: str) -> None:
        self._let_go(session, ticket).files.close()

    def _let_go(self, session: str, ticket: str) -> _Held:
        held = self._held[session].pop(ticket)
        if not self._held[session]:
            del self._held[session]
        held.expiry.cancel()
        return held


async def _receive(connection: socket.socket, files: Files) -> bytes:
    """A message; every descriptor that came with it is in `files`, whatever is raised."""
    message = b""
    while True:
        await _readable(connection)
        try:
            more, numbers, flags, _ = socket.recv_fds(
                connection, LENGTH_NBYTES + MAX_MESSAGE, MAX_FILES + 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            continue
        files.numbers += numbers
        if len(files.numbers) > MAX_FILES or flags & socket.MSG_CTRUNC:  # the latter: this process can open no more
            raise too_many_files(len(files.numbers))
        if not more:
            raise _malformed("it ends early")
        message += more
        if len(message) >= LENGTH_NBYTES:
            length = int.from_bytes(message[:LENGTH_NBYTES], "big")
            if length > MAX_MESSAGE or len(message) > LENGTH_NBYTES + length:
                raise _malformed(f"it has {len(message)} bytes, its length is given as {length}")
            if len(message) == LENGTH_NBYTES + length:
                return message[LENGTH_NBYTES:]


async def _readable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def _malformed(why: str) -> KvferryError:
    return Malformed(
        "malformed_handover", f"what came is no handover: {why}", field="files",
        remedy="4 bytes of length, a kvferry.v1.Handover, and the descriptors with the first byte",
    )  # fmt: skip
