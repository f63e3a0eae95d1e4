"""Print the attempts that two decode ranks give to the requests of one room, of which one gives up the first early.
SGLang's own queue makes the receivers, by the plug-in; daemons are played. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_numbers.py
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.plugins import load_plugins

from kvferry.handoff import Counted, Remembered
from kvferry.schemas import SourceBody
from kvferry.sglang import BACKEND
from kvferry.sglang.manager import Manager
from kvferry.weights import Adapters

SOURCE = SourceBody(engine_id="p", address="127.0.0.1:9")


class Rank:
    """A rank of a decode engine, as far as it numbers what it receives."""

    def __init__(self) -> None:
        self.given: list[int] = []
        manager: Any = object.__new__(Manager)
        manager.attempts, manager.prefill_info_table, manager.timeout_s = Counted(), Remembered(), 1.0
        manager.rank = SimpleNamespace(
            daemon=SimpleNamespace(receive=self._receive), idle=SimpleNamespace(wake_after=lambda end: None),
            adapters=Adapters(),
        )  # fmt: skip
        manager.source, manager.drain = lambda address: SOURCE, lambda room, receiver: None
        self.queue: Any = object.__new__(DecodePreallocQueue)
        self.queue.kv_manager, self.queue.queue, self.queue.metadata_buffers = manager, [], None
        self.queue.transfer_backend, self.queue.scheduler = (
            TransferBackend(BACKEND),
            SimpleNamespace(enable_overlap=False),
        )

    def _receive(self, request_id: str, *_: object, attempt: int, **__: object) -> Any:
        self.given.append(attempt)
        return SimpleNamespace(done=lambda: False, cancel=lambda: None)

    def comes(self, room: int) -> Any:
        """A request that the first rank has broadcast: its receiver."""
        req = SimpleNamespace(
            bootstrap_host="p", bootstrap_port=1, bootstrap_room=room, rid="r", origin_input_ids=[1, 2, 3],
            lora_id=None, input_embeds=None,
        )  # fmt: skip
        return self.queue._create_receiver_and_enqueue(req).kv_receiver

    def receives(self, receiver: Any) -> None:
        receiver.init(0)
        receiver.send_metadata(np.array([1], np.int32))


def main() -> None:
    load_plugins()
    ranks = Rank(), Rank()
    for at, rank in enumerate(ranks):
        first = rank.comes(7)
        if at:
            first.abort()  # as SGLang does where a rank does not learn who prefills
        else:
            rank.receives(first)
        rank.receives(rank.comes(8))
        rank.receives(rank.comes(7))
    print(json.dumps([rank.given for rank in ranks]))


main()
