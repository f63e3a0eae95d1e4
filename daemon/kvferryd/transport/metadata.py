"""What a peer's NIXL metadata holds, read before NIXL does: its own reader trusts every length and name in it.

nixlSerDes, of NIXL 1.5: a list of fields, each a tag of known text, the value's length in 8 bytes, the value, and `|`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from kvferryd.transport.read import TransportError

INTRO = b"nixlSerDes|"
MAX_NBYTES = 1 << 20
"""Metadata of 20,000 registrations; ours have a few."""
MAX_NAME = 256
DEVICES = 1024
MEMORY_TYPES = (0, 1)
"""NIXL's DRAM and VRAM."""
LENGTH, DESCRIPTOR = struct.Struct("<Q"), struct.Struct("<QQQ")


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
    fields = _Fields(blob)
    loaded = fields.take(b"Agent")
    if loaded != name.encode() or not 0 < len(loaded) <= MAX_NAME:
        raise malformed(f"it is that of agent {loaded[:MAX_NAME].decode(errors='replace')!r}, not of {name!r}")
    rest = fields.at
    if fields.number(b"Conns") != 1 or fields.take(b"t") != b"UCX" or not fields.take(b"c"):
        raise malformed("it has not one connection, of UCX")
    if fields.take(b"") != b"MemSection":
        raise malformed("it has no list of memory")
    seen: list[int] = []
    for _ in range(fields.count(b"nixlSecElms", at_most=len(MEMORY_TYPES))):
        if fields.take(b"bknd") != b"UCX" or fields.take(b"nixlDList") != b"nixlSDList":
            raise malformed("its memory is not of UCX")
        seen.append(int.from_bytes(fields.take(b"t", 4), "little"))
        for _ in range(fields.count(b"n", at_least=1, at_most=MAX_NBYTES)):
            _check_descriptor(fields.take(b""))
    if len(set(seen)) < len(seen) or not set(seen) <= set(MEMORY_TYPES):
        raise malformed(f"it has memory of types {seen}")
    if fields.at != len(blob):
        raise malformed("something follows its end")
    alias = f"{name}#{hashlib.sha256(blob).hexdigest()[:16]}".encode()
    return Metadata(alias.decode(), INTRO + b"Agent" + LENGTH.pack(len(alias)) + alias + b"|" + blob[rest:])


def _check_descriptor(value: bytes) -> None:
    if len(value) <= DESCRIPTOR.size:
        raise malformed("a descriptor of its memory has no key")
    address, nbytes, device = DESCRIPTOR.unpack_from(value)
    if not address or not nbytes or address + nbytes >= 1 << 64 or device >= DEVICES:
        raise malformed(f"it describes {nbytes} bytes at {address:#x} of device {device}")


class _Fields:
    """Takes the fields in order; `at` is where the next begins."""

    def __init__(self, blob: bytes) -> None:
        if len(blob) > MAX_NBYTES or not blob.startswith(INTRO):
            raise malformed(f"{len(blob)} bytes are no NIXL metadata")
        self._blob, self.at = blob, len(INTRO)

    def take(self, tag: bytes, nbytes: int | None = None) -> bytes:
        """The value of the next field, which has this tag and, where it is given, this length."""
        start = self.at + len(tag) + LENGTH.size
        if start > len(self._blob) or not self._blob.startswith(tag, self.at):
            raise malformed(f"byte {self.at} is no field {tag.decode()!r}")
        (length,) = LENGTH.unpack_from(self._blob, start - LENGTH.size)
        stop = start + length
        if nbytes not in (None, length) or stop >= len(self._blob) or self._blob[stop] != ord("|"):
            raise malformed(f"field {tag.decode()!r} cannot have {length} bytes")
        self.at = stop + 1
        return self._blob[start:stop]

    def number(self, tag: bytes) -> int:
        return int(LENGTH.unpack(self.take(tag, LENGTH.size))[0])

    def count(self, tag: bytes, *, at_least: int = 0, at_most: int) -> int:
        number = self.number(tag)
        if not at_least <= number <= at_most:
            raise malformed(f"{tag.decode()} = {number}")
        return number


def malformed(why: str) -> TransportError:
    return TransportError(
        "malformed_metadata",
        f"the peer's NIXL metadata is malformed: {why}",
        field="agent_metadata",
        remedy="check that the peer is a kvferry daemon with the same NIXL",
    )
