"""Handing open files to the daemon. gRPC carries no descriptors: they go over a second Unix socket, beside the engine
socket, for a ticket that the next call names."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError, Message

from kvferry.descriptors import shortage
from kvferry.errors import Full, KvferryError, Unavailable
from kvferry.file import File
from kvferry.process import Process
from kvferry.v1 import engine_pb2
from kvferry.wire import problem_from_proto

SUFFIX = ".fd"
"""The handover socket's path is that of the engine socket with this behind it."""
MAX_FILES = 240
"""In one handover. Linux carries at most 253 with one message."""
MAX_MESSAGE = 16 << 10
HANDOVER_S, OPENS_S = 5.0, 1.0
EXCHANGE_S = 4 * HANDOVER_S
"""The longest that all steps of an exchange may take."""
LENGTH_NBYTES = 4


def hand_over(engine_socket: str, session: str, files: Sequence[int]) -> tuple[str, Process | None]:
    """Give the daemon descriptors of its own for these files: (the ticket for them, the daemon's process).

    The daemon learns this process by it, also with no files. Blocks, each step at most 5 s. Use the ticket at once: the
    daemon closes what nobody asks for within seconds. The caller's descriptors stay the caller's; the process is the
    caller's to close. Raises KvferryError: `too_many_files`, `handover_failed`, or what the daemon refuses.
    """
    if len(files) > MAX_FILES:
        raise too_many_files(len(files))
    with _exchange(engine_socket) as handing:
        socket.send_fds(handing, [framed(engine_pb2.Handover(session=session, files=len(files)))], list(files))
        return _answer(handing).ticket, Process.at(handing)


def open_pipe(engine_socket: str, session: str) -> tuple[socket.socket, Process | None]:
    """(the session's pipe, see `kvferry.pipe`; the daemon's process), both the caller's to close. As `hand_over` of no
    files, with its errors; but each step takes at most 1 s: there is another way."""
    with _exchange(engine_socket, OPENS_S) as handing:
        handing.sendall(framed(engine_pb2.Handover(session=session, pipe=True)))
        _answer(handing)
        pipe = handing.dup()
        pipe.setblocking(False)
        return pipe, Process.at(handing)


def fetch(engine_socket: str, session: str, ticket: str, count: int = 1) -> list[File]:
    """The files that the daemon offers, so many for the ticket that it gave; the caller's to close.

    Blocks, each step at most 5 s. Raises KvferryError: `handover_failed`, or what the daemon refuses.
    """
    files: list[File] = []
    try:
        with _exchange(engine_socket) as handing:
            handing.sendall(framed(engine_pb2.Handover(session=session, ticket=ticket)))
            head, numbers, _, _ = socket.recv_fds(handing, LENGTH_NBYTES, count, socket.MSG_CMSG_CLOEXEC)
            files = list(map(File, numbers))
            _answer(handing, head)
            if len(files) != count:  # the kernel has closed those beyond what was asked for
                raise ValueError(f"{len(files)} files came instead of {count}")
            fetched, files = files, []
            return fetched
    finally:
        File.close_all(files)


@contextlib.contextmanager
def _exchange(engine_socket: str, step_s: float = HANDOVER_S) -> Iterator[socket.socket]:
    path = f"{engine_socket}{SUFFIX}"
    try:
        with socket.socket(socket.AF_UNIX) as handing:
            handing.settimeout(step_s)
            handing.connect(path)
            yield handing
    except (OSError, ValueError, LookupError, DecodeError) as error:
        message = f"the daemon did not exchange files: {error}"
        remedy = "the socket lies beside the engine socket: mount the folder of both, not the one file"
        raise Unavailable("handover_failed", message, field="socket", value=path, remedy=remedy) from None


def _answer(handing: socket.socket, head: bytes = b"") -> engine_pb2.HandoverReply:
    head += _read(handing, LENGTH_NBYTES - len(head))
    if (length := int.from_bytes(head, "big")) > MAX_MESSAGE:
        raise ValueError(f"an answer of {length} bytes")
    said = _read(handing, length)
    reply = engine_pb2.HandoverReply.FromString(said)
    if reply.HasField("problem"):
        raise problem_from_proto(reply.problem)
    return reply


def _read(handing: socket.socket, nbytes: int) -> bytes:
    """So many bytes and none behind them, which are the pipe's."""
    came = b""
    while len(came) < nbytes:
        if not (more := handing.recv(nbytes - len(came))):
            raise ValueError("it closed the connection")
        came += more
    return came


def framed(message: Message) -> bytes:
    """A message as it is sent on the socket: its length, then itself."""
    said = message.SerializeToString()
    return len(said).to_bytes(LENGTH_NBYTES, "big") + said


def too_many_files(count: int) -> KvferryError:
    message = f"at most {MAX_FILES} files are handed over at once, and held for one session"
    remedy = "make regions of fewer, larger allocations, or allocate through the daemon"
    return Full("too_many_files", message, field="files", value=count, remedy=remedy)


def sealed_file(name: str, nbytes: int) -> int:
    """A descriptor of new memory, zeroed and taken at once, that nobody can make smaller under one who has it mapped.

    Raises KvferryError (`out_of_memory`). The caller closes it.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        os.close(file)
        message = f"there is no room for {nbytes} bytes of shared memory: {error}"
        remedy = "raise the memory limit of the container, or ask for fewer bytes"
        raise Full("out_of_memory", message, field="nbytes", value=nbytes, remedy=remedy) from None
    return file


def map_sealed(file: int, nbytes: int, offset: int = 0, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """These bytes of a file, from the page on in which they begin. The caller may close the descriptor.

    Raises KvferryError: `out_of_descriptors`; `region_unavailable`, also unless the file can never have fewer bytes:
    its owner could end with SIGBUS whoever has it mapped.
    """
    _check_sealed(file, offset + nbytes)
    page = offset - offset % mmap.PAGESIZE
    try:
        return mmap.mmap(file, offset - page + nbytes, prot=prot, offset=page)
    except (OSError, ValueError, OverflowError) as error:
        raise shortage(error) or unavailable(str(error)) from None


def unavailable(why: str, path: str = "") -> KvferryError:
    message = f"the shared region cannot be mapped: {why}"
    remedy = "use the descriptor or path of a region that is open, with offset and nbytes inside it"
    return Unavailable("region_unavailable", message, field="path" if path else "file", value=path, remedy=remedy)


def _check_sealed(file: int, nbytes: int) -> None:
    try:
        sealed = bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no kind of file that can be sealed
        sealed = False
    size = os.fstat(file).st_size
    if not sealed or size < nbytes:
        message = f"the file has {size} bytes and is {'' if sealed else 'not '}sealed against shrinking"
        remedy = "hand over a memfd with F_SEAL_SHRINK that has as many bytes (kvferry.memory.memfd_region)"
        raise Unavailable("region_unavailable", message, field="nbytes", value=nbytes, remedy=remedy)
