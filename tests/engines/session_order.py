"""Print how calls of a vLLM worker's session at a real daemon end. Run by the Python that vLLM is installed for.

.venv-engines/bin/python tests/engines/session_order.py SOCKET URL
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import httpx
from small_engine import BLOCK, attached

from kvferry.tables import BlockTable
from kvferry.vllm.options import Options
from kvferry.vllm.session import End, Session
from kvferry.vllm.step import Publish

WITHIN_S = 20.0
LEASES, LONGER = itertools.count(1), 100


def leases(url: str) -> list[str]:
    return [lease["request_id"] for lease in httpx.get(f"{url}/v1/leases", trust_env=False).json()["leases"]]


def publish(request_id: str, blocks: list[int], *, lease: int = 0, last: bool = True) -> Publish:
    """In another lease, or more of the one of this number."""
    return Publish(
        request_id, lease or next(LEASES), {"0": BlockTable.of(blocks)}, BLOCK * len(blocks), last, b"digest", 1
    )


def ends(session: Session, count: int) -> list[tuple[str, str]]:
    """The first `count` of them, or those that came in time."""
    told: list[tuple[str, str]] = []
    deadline = time.monotonic() + WITHIN_S
    while len(told) < count and time.monotonic() < deadline:
        ended: dict[End, set[str]] = session.ended(0.1)
        told += [(request_id, end.name) for end, request_ids in ended.items() for request_id in request_ids]
    return told


def main() -> None:
    client = attached(sys.argv[1], "0")
    session, told = Session(client, Options()), {}

    def late() -> None:
        """The next calls come to the client's event loop in one turn."""
        client._loop.call_soon_threadsafe(time.sleep, 0.05)

    for name in ("at once", "in two parts"):
        late()
        if name == "in two parts":
            session.publish(publish(name, [1, 2], lease=LONGER, last=False), "")
        session.publish(publish(name, [1, 2, 3], lease=LONGER), "")
        session.revoke(name)
    session.publish(publish("again", [1, 2]), "")
    late()
    session.revoke("again")
    session.publish(publish("again", [3, 4]), "")
    told["waits for what was published again"] = session.waiting

    session.publish(publish("refused", [5, 6], lease=LONGER, last=False), "")
    session.publish(publish("refused", [7, 8], lease=LONGER), "")
    session.hold("refused")
    told["refused"] = sorted(ends(session, 2))
    told["left then"] = [name for name in leases(sys.argv[2]) if name == "refused"]
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    client.close()


if __name__ == "__main__":
    main()
