"""Print what is left of a request whose last publish a real daemon refuses, and whose a room is when a lease has ended;
with the daemon's PID and a method of its sender, what that raises when a part was sent and the daemon stands still. Run
by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_refused.py SOCKET URL [PID METHOD]
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import httpx
import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from small_engine import BLOCK, attached

from kvferry.sglang.cache import GROUP
from kvferry.sglang.prompt import NUMBER
from kvferry.sglang.receiver import Receiver
from kvferry.sglang.sender import Sender
from kvferry.weights import Adapters, Weights

WITHIN_S = 20.0
METADATA = ctypes.create_string_buffer(100 << 10)
"""More than a daemon takes."""


def main() -> None:
    client = attached(sys.argv[1], GROUP)
    stop = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    idle, options = SimpleNamespace(wake_after=lambda end: None), SimpleNamespace(lease_ttl_s=60.0)
    nbytes = 8 if stop else len(METADATA)
    manager = SimpleNamespace(
        senders=WeakValueDictionary(), kv_args=SimpleNamespace(page_size=BLOCK, state_types=[]),
        aux_rows=lambda index: [(ctypes.addressof(METADATA), nbytes)],
        rank=SimpleNamespace(
            daemon=client, written=lambda: None, options=options, idle=idle, cached_since=1, adapters=Adapters(),
            dp_number=0, dp_count=1,
            weights=Weights(client, "refused/1", logging.info),
        ),
    )  # fmt: skip
    request = sent(manager, 7, [1, 2], *([] if stop else [[3, 4]]))
    told = silent(request, stop, sys.argv[4]) if stop else refused(request, sys.argv[2])
    nbytes = 8
    print(json.dumps(told | {"rooms": odd_rooms(manager), "held": held(manager, sys.argv[2])}))
    client.close()


def sent(manager: Any, room: int, *chunks: list[int]) -> Sender:
    """A request of four pages, of which SGLang has sent these."""
    request = Sender(manager, "address", room)
    request.bind(request_of(room))
    request.init(4)
    for pages in chunks:
        request.send(np.array(pages, np.int32))
    return request


def held(manager: Any, url: str) -> list[bool]:
    """Whether another request is refused in a room: when the lease of its request has ended, when SGLang has heard that
    it failed, when SGLang has cleared one, and when it clears that once more, which has left its room to another."""
    first = sent(manager, 8, [1, 2], [3, 4])
    until(lambda: bool(leases(url)))
    httpx.delete(f"{url}/v1/leases/room-8", trust_env=False).raise_for_status()
    until(lambda: first.poll() == KVPoll.Failed)
    told = [taken(manager, 8)]
    with contextlib.suppress(KVTransferError):
        first.failure_exception()
    told.append(taken(manager, 8))
    cleared = sent(manager, 9)
    told.append(taken(manager, 9))
    cleared.clear()
    told.append(taken(manager, 9))
    another = sent(manager, 9)
    cleared.clear()
    told.append(taken(manager, 9))
    another.clear()
    return told


def taken(manager: Any, room: int) -> bool:
    return sent(manager, room).poll() == KVPoll.Failed


def request_of(room: object) -> Any:
    """As far as a sender and a receiver look at it."""
    return SimpleNamespace(
        bootstrap_room=room, disagg_prefill_dp_rank=None, origin_input_ids=list(range(50)), lora_id=None,
        input_embeds=None, positional_embed_overrides=None, sampling_params=SimpleNamespace(custom_params={NUMBER: 1}),
    )  # fmt: skip


def odd_rooms(manager: object) -> dict[str, list[bool]]:
    """Which of the two ends refuse a room by name, by the room."""
    told = {}
    for room in (None, -1, 0, 1 << 63, 1 << 64):
        req, ends = request_of(room), (Sender(manager, "address", room), Receiver(manager, "address", room))
        for end in ends:
            end.bind(req)
        told[str(room)] = [end.poll() == KVPoll.Failed and "bootstrap_room" in end._why for end in ends]
    return told


def refused(request: Sender, url: str) -> dict[str, object]:
    until(lambda: request.poll() in (KVPoll.Failed, KVPoll.Success))
    left = [lease["request_id"] for lease in leases(url)]
    why = ""
    try:
        request.failure_exception()
    except KVTransferError as error:
        why = str(error)
    return {"failed": request.poll() == KVPoll.Failed, "why": why, "left": left}


def silent(request: Sender, daemon: int, method: str) -> dict[str, object]:
    """It fails on another rank, or is aborted, while its daemon stands still."""
    until(lambda: bool(leases(sys.argv[2])))
    request._daemon.client._session.call_timeout_s = 1.0
    os.kill(daemon, signal.SIGSTOP)
    try:
        getattr(request, method)()
    except (SystemExit, KVTransferError) as error:
        return {"raised": type(error).__name__, "why": str(error)}
    finally:
        os.kill(daemon, signal.SIGCONT)
    return {}


def leases(url: str) -> list[dict[str, object]]:
    return httpx.get(f"{url}/v1/leases", trust_env=False).json()["leases"]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)


if __name__ == "__main__":
    main()
