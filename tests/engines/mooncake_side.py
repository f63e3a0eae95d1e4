"""A side of Mooncake's TCP transfers, run by the Python that has Mooncake: it reads and answers lines of JSON.

    python mooncake_side.py POOL_NBYTES SEED

First it says its `name` and the `address` of its pool, which is full of random bytes of its seed. Each line then asks
it to read: `from` (a name), `to` and `at` (addresses of runs, here and there), `nbytes` of a run. It answers with
`seconds`, and a `digest` of what it has there.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine


def main(nbytes: int, seed: int) -> None:
    pool = np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)
    engine = TransferEngine()
    assert not engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert not engine.register_memory(pool.ctypes.data, nbytes)
    say({"name": f"127.0.0.1:{engine.get_rpc_port()}", "address": pool.ctypes.data})
    for line in sys.stdin:
        asked = json.loads(line)
        sizes = [asked["nbytes"]] * len(asked["to"])
        began = time.perf_counter()
        failed = engine.batch_transfer_sync_read(asked["from"], asked["to"], asked["at"], sizes)
        seconds = time.perf_counter() - began
        say({"seconds": seconds, "failed": failed, "digest": digest(pool, asked["to"], asked["nbytes"])})


def digest(pool: np.ndarray, addresses: list[int], nbytes: int) -> str:
    """The digest of the runs at these addresses."""
    rows = pool.reshape(-1, nbytes)
    return hashlib.sha256(rows[(np.array(addresses) - pool.ctypes.data) // nbytes]).hexdigest()


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
