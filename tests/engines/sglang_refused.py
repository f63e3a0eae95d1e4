"""Print what is left of a request whose last publish a real daemon refuses. Run by the Python that SGLang is installed
for.

.venv-sglang/bin/python tests/engines/sglang_refused.py SOCKET URL
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from types import SimpleNamespace
from weakref import WeakValueDictionary

import httpx
import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from small_engine import BLOCK, attached

from kvferry.sglang.cache import GROUP
from kvferry.sglang.prompt import Prompt
from kvferry.sglang.sender import Sender

WITHIN_S = 20.0
METADATA = ctypes.create_string_buffer(100 << 10)
"""More than a daemon takes."""


def main() -> None:
    client = attached(sys.argv[1], GROUP)
    idle, options = SimpleNamespace(wake_after=lambda end: None), SimpleNamespace(lease_ttl_s=60.0)
    manager = SimpleNamespace(
        senders=WeakValueDictionary(), kv_args=SimpleNamespace(page_size=BLOCK),
        aux_rows=lambda index: [(ctypes.addressof(METADATA), len(METADATA))],
        rank=SimpleNamespace(daemon=client, written=lambda: None, options=options, idle=idle),
    )  # fmt: skip
    sender = Sender(manager, "address", 7)
    sender._prompt = Prompt(50, b"digest")
    sender.init(4)
    for pages in ([1, 2], [3, 4]):
        sender.send(np.array(pages, np.int32))
    deadline = time.monotonic() + WITHIN_S
    while sender.poll() not in (KVPoll.Failed, KVPoll.Success) and time.monotonic() < deadline:
        time.sleep(0.001)
    left = [lease["request_id"] for lease in httpx.get(f"{sys.argv[2]}/v1/leases", trust_env=False).json()["leases"]]
    why = ""
    try:
        sender.failure_exception()
    except KVTransferError as error:
        why = str(error)
    print(json.dumps({"failed": sender.poll() == KVPoll.Failed, "why": why, "left": left}))
    client.close()


if __name__ == "__main__":
    main()
