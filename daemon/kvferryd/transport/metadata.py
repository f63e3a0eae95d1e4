"""A peer's NIXL metadata, read before NIXL reads it: NIXL's own reader trusts every length and name in it.

nixlSerDes, of NIXL 1.5: a list of fields, each a tag of known text, the value's length in 8 bytes, the value, and `|`.

UCX reads the addresses and keys inside without checking a single length, and connects to whatever they name, for
minutes where nobody answers. A hundredth of the random mutations that are well-formed to NIXL ends the process that
loads or first uses them (tests/faults/test_hostile_metadata.py). So well-formed metadata is tried in another process
first, which may die of it: `kvferryd.transport.screen`.
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
UCX_MEMORY_TYPES = 3
"""UCX's host, CUDA and CUDA managed memory."""
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
        raise malformed(f"{len(blob)} bytes are no NIXL metadata")
    at = len(INTRO)

    def take(tag: bytes, nbytes: int | None = None) -> bytes:
        """The value of the next field, which has this tag and, where it is given, this length."""
        nonlocal at
        start = at + len(tag) + LENGTH.size
        if start > len(blob) or not blob.startswith(tag, at):
            raise malformed(f"byte {at} is no field {tag.decode()!r}")
        (length,) = LENGTH.unpack_from(blob, start - LENGTH.size)
        stop = start + length
        if nbytes not in (None, length) or stop >= len(blob) or blob[stop] != ord("|"):
            raise malformed(f"field {tag.decode()!r} cannot have {length} bytes")
        at = stop + 1
        return blob[start:stop]

    def number(tag: bytes, *, at_least: int, at_most: int) -> int:
        value = int(LENGTH.unpack(take(tag, LENGTH.size))[0])
        if not at_least <= value <= at_most:
            raise malformed(f"{tag.decode()} = {value}")
        return value

    loaded = take(b"Agent")
    if loaded != name.encode() or not 0 < len(loaded) <= MAX_NAME:
        raise malformed(f"it is that of agent {loaded[:MAX_NAME].decode(errors='replace')!r}, not of {name!r}")
    rest = at
    number(b"Conns", at_least=1, at_most=1)
    if take(b"t") != b"UCX" or not take(b"c"):
        raise malformed("its connection is not of UCX")
    if take(b"") != b"MemSection":
        raise malformed("it has no list of memory")
    seen: list[int] = []
    for _ in range(number(b"nixlSecElms", at_least=0, at_most=len(MEMORY_TYPES))):
        if take(b"bknd") != b"UCX" or take(b"nixlDList") != b"nixlSDList":
            raise malformed("its memory is not of UCX")
        seen.append(int.from_bytes(take(b"t", 4), "little"))
        for _ in range(number(b"n", at_least=1, at_most=MAX_NBYTES)):
            _check_descriptor(take(b""))
    if len(set(seen)) < len(seen) or not set(seen) <= set(MEMORY_TYPES):
        raise malformed(f"it has memory of types {seen}")
    if at != len(blob):
        raise malformed("something follows its end")
    alias = f"{name}#{hashlib.sha256(blob).hexdigest()[:16]}".encode()
    return Metadata(alias.decode(), INTRO + b"Agent" + LENGTH.pack(len(alias)) + alias + b"|" + blob[rest:])


def connection_of(blob: bytes) -> bytes:
    """How an agent of ours is connected, by its metadata: the same without its memory, and without any key."""
    head, section, _ = blob.partition(b"MemSection|")
    return head + section + b"nixlSecElms" + LENGTH.pack(LENGTH.size) + LENGTH.pack(0) + b"|"


def _check_descriptor(value: bytes) -> None:
    if len(value) <= DESCRIPTOR.size:
        raise malformed("a descriptor of its memory has no key")
    address, nbytes, device = DESCRIPTOR.unpack_from(value)
    if not address or not nbytes or address + nbytes >= 1 << 64 or device >= DEVICES:
        raise malformed(f"it describes {nbytes} bytes at {address:#x} of device {device}")
    _check_key(value[DESCRIPTOR.size :])


def _check_key(key: bytes) -> None:
    """UCX's ucp_rkey_pack: a map of memory domains, the type of memory, and for each domain a length and its key. UCX
    takes the type as an index, so what a wrong one does is not the same in two processes."""
    if len(key) < KEY.size:
        raise malformed(f"a key of its memory has {len(key)} bytes")
    domains, memory_type = KEY.unpack_from(key)
    at = KEY.size
    for _ in range(domains.bit_count()):
        at += 1 + key[at] if at < len(key) else len(key)
    if memory_type >= UCX_MEMORY_TYPES or at > len(key):
        raise malformed(f"a key of its memory has type {memory_type} and {at} of {len(key)} bytes")


def malformed(why: str) -> TransportError:
    """The error for metadata that no kvferry daemon would give."""
    what, remedy = "the peer's NIXL metadata is malformed", "check that the peer is a kvferry daemon with the same NIXL"
    return TransportError("malformed_metadata", f"{what}: {why}", field="agent_metadata", remedy=remedy)
