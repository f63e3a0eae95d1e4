"""Print the attempts that two decode ranks have of the requests of a room. The first rank numbers them, one by one and
in a batch; the second rank gives up the first one early. SGLang's own queue makes the receivers, by the plug-in;
daemons are played. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_numbers.py
"""

from __future__ import annotations

import itertools
import json
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from kvferry.handoff import Remembered
from kvferry.schemas import SourceBody
from kvferry.sglang import BACKEND
from kvferry.sglang.manager import Manager
from kvferry.sglang.prompt import NUMBER, number
from kvferry.weights import Adapters

SOURCE = SourceBody(engine_id="p", address="127.0.0.1:9")


class Rank:
    """A rank of a decode engine, as far as it numbers what it receives."""

    def __init__(self) -> None:
        self.given: list[int] = []
        manager: Any = object.__new__(Manager)
        manager.prefill_info_table, manager.timeout_s = Remembered(), 1.0
        manager.kv_args = SimpleNamespace(page_size=16)
        manager.rank = SimpleNamespace(
            daemon=SimpleNamespace(receive=self._receive), idle=SimpleNamespace(wake_after=lambda end: None),
            adapters=Adapters(), on_gpu=False,
        )  # fmt: skip
        manager.source, manager.drain = lambda address, dp_rank: SOURCE, lambda room, receiver: None
        self.queue: Any = object.__new__(DecodePreallocQueue)
        self.queue.kv_manager, self.queue.queue, self.queue.metadata_buffers = manager, [], None
        self.queue.transfer_backend = TransferBackend(BACKEND)

    def _receive(self, request_id: str, *_: object, attempt: int, **__: object) -> Any:
        self.given.append(attempt)
        return SimpleNamespace(done=lambda: False, cancel=lambda: None)

    def comes(self, said: TokenizedGenerateReqInput) -> Any:
        """A request that the first rank has broadcast: its receiver."""
        req = SimpleNamespace(
            bootstrap_host="p", bootstrap_port=1, bootstrap_room=said.bootstrap_room, rid=said.rid,
            origin_input_ids=[1, 2, 3], lora_id=None, input_embeds=None, positional_embed_overrides=None,
            sampling_params=said.sampling_params,
        )  # fmt: skip
        return self.queue._create_receiver_and_enqueue(req).kv_receiver

    def receives(self, receiver: Any) -> None:
        receiver.init(0)
        receiver.send_metadata(np.array([1], np.int32))


def said(room: int) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        input_text=None, input_ids=None, input_embeds=None, mm_inputs=None, token_type_ids=None,
        sampling_params=SamplingParams(custom_params={NUMBER: 99}), return_logprob=False, logprob_start_len=0,
        top_logprobs_num=0, token_ids_logprob=None, stream=False, rid="r", bootstrap_room=room,
    )  # fmt: skip


def main() -> None:
    load_plugins()
    ranks, requests = (Rank(), Rank()), [said(room) for room in (7, 8, 7)]
    number([requests[0], BatchTokenizedGenerateReqInput(batch=requests[1:])], itertools.count(1))
    sent = pickle.dumps(requests)  # as SGLang broadcasts them
    for at, rank in enumerate(ranks):
        first, *later = map(rank.comes, pickle.loads(sent))
        if at:
            first.abort()  # as SGLang does where a rank does not learn who prefills
        for receiver in later if at else [first, *later]:
            rank.receives(receiver)
    print(json.dumps([rank.given for rank in ranks]))


main()
