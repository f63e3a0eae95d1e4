"""What a peer's NIXL metadata holds, read before NIXL does: its own reader trusts every length and name in it.

nixlSerDes, of NIXL 1.5: a list of fields, each a tag of known text, the value's length in 8 bytes, the value, and `|`.

UCX reads the addresses and keys inside without checking a single length, and connects to whatever they name, for
minutes where nobody answers. Of random mutations that are well-formed to NIXL one in a hundred ends the process that
loads or first uses them (tests/faults/test_hostile_metadata.py). So they are loaded, connected and read from once in
another process first, one that may die of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvferryd.transport import screening
from kvferryd.transport.read import Span, TransportError, nixl_failed
from kvferryd.transport.screening import FINE, LATE, READY

INTRO = b"nixlSerDes|"
MAX_NBYTES = 1 << 20
"""Metadata of 20,000 registrations; ours have a few."""
START_S = 60.0
"""The longest that the process which tries metadata may take to come up: seconds on a busy machine."""
MAX_NAME = 256
DEVICES = 1024
MEMORY_TYPES = (0, 1)
"""NIXL's DRAM and VRAM."""
UCX_MEMORY_TYPES = 3
"""UCX's host, CUDA and CUDA managed memory."""
LOADS, AT_ONCE = 128, 32
"""Peers that one process loads in all, and together: UCX closes a connection, at both ends, only when one of their
processes ends."""
READING = 0.8
"""The part of the time for an answer in which the process reads. In the rest it can say which peers are late."""
LENGTH, DESCRIPTOR, KEY = struct.Struct("<Q"), struct.Struct("<QQQ"), struct.Struct("<QB")


@dataclass(frozen=True, slots=True)
class Metadata:
    """Well-formed metadata of one agent.

    alias: the name to load and read it by. It belongs to these very bytes, so an impostor with the name of another
    agent is neither taken for that agent nor keeps it out.
    """

    alias: str
    blob: bytes


def parse(name: str, blob: bytes) -> Metadata:
    """`blob` as the metadata of agent `name`. Raises TransportError (`malformed_metadata`)."""
    if len(blob) > MAX_NBYTES or not blob.startswith(INTRO):
        raise _malformed(f"{len(blob)} bytes are no NIXL metadata")
    at = len(INTRO)

    def take(tag: bytes, nbytes: int | None = None) -> bytes:
        """The value of the next field, which has this tag and, where it is given, this length."""
        nonlocal at
        start = at + len(tag) + LENGTH.size
        if start > len(blob) or not blob.startswith(tag, at):
            raise _malformed(f"byte {at} is no field {tag.decode()!r}")
        (length,) = LENGTH.unpack_from(blob, start - LENGTH.size)
        stop = start + length
        if nbytes not in (None, length) or stop >= len(blob) or blob[stop] != ord("|"):
            raise _malformed(f"field {tag.decode()!r} cannot have {length} bytes")
        at = stop + 1
        return blob[start:stop]

    def number(tag: bytes, *, at_least: int, at_most: int) -> int:
        value = int(LENGTH.unpack(take(tag, LENGTH.size))[0])
        if not at_least <= value <= at_most:
            raise _malformed(f"{tag.decode()} = {value}")
        return value

    loaded = take(b"Agent")
    if loaded != name.encode() or not 0 < len(loaded) <= MAX_NAME:
        raise _malformed(f"it is that of agent {loaded[:MAX_NAME].decode(errors='replace')!r}, not of {name!r}")
    rest = at
    number(b"Conns", at_least=1, at_most=1)
    if take(b"t") != b"UCX" or not take(b"c"):
        raise _malformed("its connection is not of UCX")
    if take(b"") != b"MemSection":
        raise _malformed("it has no list of memory")
    seen: list[int] = []
    for _ in range(number(b"nixlSecElms", at_least=0, at_most=len(MEMORY_TYPES))):
        if take(b"bknd") != b"UCX" or take(b"nixlDList") != b"nixlSDList":
            raise _malformed("its memory is not of UCX")
        seen.append(int.from_bytes(take(b"t", 4), "little"))
        for _ in range(number(b"n", at_least=1, at_most=MAX_NBYTES)):
            _check_descriptor(take(b""))
    if len(set(seen)) < len(seen) or not set(seen) <= set(MEMORY_TYPES):
        raise _malformed(f"it has memory of types {seen}")
    if at != len(blob):
        raise _malformed("something follows its end")
    alias = f"{name}#{hashlib.sha256(blob).hexdigest()[:16]}".encode()
    return Metadata(alias.decode(), INTRO + b"Agent" + LENGTH.pack(len(alias)) + alias + b"|" + blob[rest:])


def _check_descriptor(value: bytes) -> None:
    if len(value) <= DESCRIPTOR.size:
        raise _malformed("a descriptor of its memory has no key")
    address, nbytes, device = DESCRIPTOR.unpack_from(value)
    if not address or not nbytes or address + nbytes >= 1 << 64 or device >= DEVICES:
        raise _malformed(f"it describes {nbytes} bytes at {address:#x} of device {device}")
    _check_key(value[DESCRIPTOR.size :])


def _check_key(key: bytes) -> None:
    """UCX's ucp_rkey_pack: a map of memory domains, the type of memory, and for each domain a length and its key. UCX
    takes the type as an index, so what a wrong one does is not the same in two processes."""
    if len(key) < KEY.size:
        raise _malformed(f"a key of its memory has {len(key)} bytes")
    domains, memory_type = KEY.unpack_from(key)
    at = KEY.size
    for _ in range(domains.bit_count()):
        at += 1 + key[at] if at < len(key) else len(key)
    if memory_type >= UCX_MEMORY_TYPES or at > len(key):
        raise _malformed(f"a key of its memory has type {memory_type} and {at} of {len(key)} bytes")


def _malformed(why: str) -> TransportError:
    what, remedy = "the peer's NIXL metadata is malformed", "check that the peer is a kvferry daemon with the same NIXL"
    return TransportError("malformed_metadata", f"{what}: {why}", field="agent_metadata", remedy=remedy)


@dataclass(slots=True, eq=False)
class _Asked:
    """Metadata that is to be tried. said: what has come of it."""

    question: tuple[str, str, list[tuple[int, int, int]]]
    failed: int = 0
    """How often it has failed beside others, or after them: it may not be what is wrong."""
    said: str | None = None


class Screen:
    """Owns the process: started by `prepare` or when it is needed, again when it has died, ended by `close` and after
    LOADS. What waits for it is tried together; only a process that has had no other peer speaks against one."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._asked: list[_Asked] = []
        self._process: asyncio.subprocess.Process | None = None
        self._loads = 0

    async def prepare(self) -> None:
        """Start it now, so that the next `check` need not wait: half a second. What fails here fails there."""
        async with self._one_at_a_time:
            if self._process is None:
                with contextlib.suppress(TransportError, OSError):
                    await self._start()

    async def check(self, metadata: Metadata, spans: Sequence[Span], timeout_s: float) -> None:
        """Load it and read a byte of each span of host memory.

        Raises TransportError: `malformed_metadata` where the process died of it, `peer_unreachable` where it did not
        answer in time, `transport_failed` with what NIXL said.
        """
        host = [(span.address, 1, 0) for span in spans if span.kind == "host"]
        asked = _Asked((metadata.alias, metadata.blob.hex(), host))
        self._asked.append(asked)
        try:
            async with self._one_at_a_time:
                while asked.said is None:  # whoever comes first asks for all that wait
                    await self._ask(asked, timeout_s)
        finally:
            self._asked.remove(asked)
        if asked.said == LATE:
            raise TransportError("peer_unreachable", "NIXL did not connect to the peer", value=timeout_s)
        if not asked.said:
            raise _malformed("the process that tried it died of it")
        if asked.said != FINE:
            raise nixl_failed(asked.said, asked.said)

    async def _ask(self, asked: _Asked, timeout_s: float) -> None:
        """Try it and others together; if that has failed, alone; if that has failed too, alone in a new process."""
        together = [asked]
        if asked.failed > 1:
            await self.close()
        elif not asked.failed:
            waiting = (each for each in self._asked if each.said is None and not each.failed)
            together = list(islice(waiting, min(AT_ONCE, LOADS - self._loads)))
        last_word = not self._loads and len(together) == 1
        for each, answer in zip(together, await self._answers(together, timeout_s), strict=True):
            if last_word or answer in (FINE, LATE):
                each.said = answer
            else:
                each.failed += 1

    async def _answers(self, together: Sequence[_Asked], timeout_s: float) -> list[str]:
        """What the process says of each; nothing where it has died, or said nothing in time of several."""
        answers: list[str] = []
        try:
            question = json.dumps([READING * timeout_s, [each.question for each in together]]).encode() + b"\n"
            answering = await self._ask_it(question, timeout_s)
            self._loads += len(together)
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ValueError):  # it has died
                    answers = json.loads(await answering.readline())
        except TimeoutError:
            answers = [LATE] if len(together) == 1 else []
        finally:
            if not answers or set(answers) != {FINE} or self._loads >= LOADS:
                await self.close()  # a failed load may have left anything behind in it
        return answers or [""] * len(together)

    async def _ask_it(self, question: bytes, timeout_s: float) -> asyncio.StreamReader:
        """Where its answers will come, once the process has said that it has the question: what it does from then on
        tells of the peers. One that has died before tells nothing of them, and another is started.

        Raises TransportError, TimeoutError.
        """
        for _ in range(2):
            process = self._process or await self._start()
            assert process.stdin is not None and process.stdout is not None
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(question)
                    await process.stdin.drain()
                    if await process.stdout.readline():
                        return process.stdout
            await self.close()
        raise TransportError("transport_failed", "the process that tries peers' metadata dies before it tries any")

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", screening.__name__,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"UCX_HANDLE_ERRORS": "none"},
            )  # fmt: skip
        except OSError as error:
            why = f"the process that tries peers' metadata cannot be started: {error}"
            remedy = "raise the daemon's limits (descriptors, memory, processes)"
            raise TransportError("transport_failed", why, remedy=remedy) from None
        assert process.stdout is not None
        said = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                said = await process.stdout.readline()
        if said.decode().strip() != READY:
            await self.close()  # else the next metadata would be taken for what it died of
            raise TransportError("transport_failed", "the process that tries peers' metadata did not start")
        return process

    async def close(self) -> None:
        process, self._process, self._loads = self._process, None, 0
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
