"""Print what a decode engine's cache holds where a request gets a slot that a step under way still writes to. SGLang's
own event loop, barrier, allocator and queue run in it, by the plug-in; the GPU takes its steps when somebody waits for
it, and the daemon is played: it writes at once. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_overlap.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue, SchedulerDisaggregationDecodeMixin
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.plugins import load_plugins

from kvferry.handoff import Remembered
from kvferry.schemas import SourceBody
from kvferry.sglang import BACKEND
from kvferry.sglang.manager import Manager
from kvferry.sglang.prompt import NUMBER
from kvferry.weights import Adapters

SOURCE = SourceBody(engine_id="p", address="127.0.0.1:9")
SLOTS, ROOM = 4, 7
OLD, LATE, RECEIVED = "ended", "written late", "received"


class Stream:
    """A GPU's: it does what it was given when somebody waits for it."""

    def __init__(self) -> None:
        self.done = 0
        self._given: list[Callable[[], None]] = []

    def give(self, work: Callable[[], None]) -> None:
        self._given.append(work)

    def record_event(self) -> Event:
        return Event(self, len(self._given))

    def reach(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            self._given[self.done - 1]()


class Event:
    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def query(self) -> bool:
        return self._stream.done >= self._place

    def synchronize(self) -> None:
        self._stream.reach(self._place)


class ScheduleStream:
    """SGLang's scheduler copies from memory that is written once this has waited."""

    def __init__(self) -> None:
        self._awaited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self._awaited.append(event)

    def wait_stream(self, stream: Stream) -> None:
        self._awaited.append(stream.record_event())

    def synchronize(self) -> None:
        while self._awaited:
            self._awaited.pop().synchronize()


class Engine(SchedulerDisaggregationDecodeMixin):
    """A decode engine as far as its event loop sees it: one request that has all slots and ends with the first step,
    and one that gets them then. A step writes a token of its request, also of one that has ended."""

    _engine_paused = gracefully_exit = False
    _apply_war_barrier = Scheduler._apply_war_barrier
    _war_barrier_enabled = True
    chunked_req = None

    def __init__(self, *, graphs: bool, overlap: bool = True, leaves: bool = False) -> None:
        self._graphs, self._leaves, self.enable_overlap = graphs, leaves, overlap
        self.schedule_stream, self.forward_stream = ScheduleStream(), Stream()
        self.model_worker = SimpleNamespace(last_shared_read_runner=SimpleNamespace(shared_read_done_event=None))
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch)
        self.disagg_decode_prealloc_queue = self._queue()
        self.allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", None, False)
        self.slots = self.allocator.alloc(SLOTS)
        self.cache = dict.fromkeys(self.slots.tolist(), OLD)
        self.running_batch: Any = SimpleNamespace(number=0)
        self.told: dict[str, Any] = {"receives": 0}
        self._receiver: Any = None
        self._turn = 0

    def _queue(self) -> Any:
        manager: Any = object.__new__(Manager)
        manager.prefill_info_table, manager.timeout_s = Remembered(), 1.0
        manager.kv_args = SimpleNamespace(aux_data_ptrs=[], aux_item_lens=[], page_size=1)
        manager.rank = SimpleNamespace(
            daemon=SimpleNamespace(receive=self._receive), idle=SimpleNamespace(wake_after=lambda end: None),
            adapters=Adapters(), on_gpu=True,
        )  # fmt: skip
        manager.source, manager.drain = lambda address, dp_rank: SOURCE, lambda room, receiver: None
        queue: Any = object.__new__(DecodePreallocQueue)
        queue.scheduler, queue.queue, queue.metadata_buffers, queue.transfer_backend = (
            self, [], None, TransferBackend(BACKEND),
        )  # fmt: skip
        queue.kv_manager, manager.rank.queue = manager, queue
        queue.prefetch_prefill_dp_rank_queries = lambda: None
        return queue

    def _receive(self, request_id: str, tables: Any, *_: object, **__: object) -> Future[Any]:
        """The daemon: as fast as may be."""
        self.told["receives"] += 1
        for slot in tables["0"].block_ids.tolist():
            self.cache[slot] = RECEIVED
        receipt: Future[Any] = Future()
        receipt.set_result(SimpleNamespace(metadata=b""))
        return receipt

    # the event loop calls these

    def ingest_requests(self) -> None:
        self._turn += 1

    def process_decode_queue(self) -> None:
        if self._receiver is not None:
            self.told["arrived"] = self._receiver.poll() == KVPoll.Success
            self.gracefully_exit = self._turn > 5
        elif self.allocator.available_size() == SLOTS:
            req = SimpleNamespace(
                bootstrap_host="p", bootstrap_port=1, bootstrap_room=ROOM, rid="r", origin_input_ids=list(range(SLOTS)),
                lora_id=None, input_embeds=None,
                positional_embed_overrides=None, sampling_params=SimpleNamespace(custom_params={NUMBER: 1}),
            )  # fmt: skip
            queue = self.disagg_decode_prealloc_queue
            self._receiver = queue._create_receiver_and_enqueue(req).kv_receiver
            self._receiver.init(0)
            self.schedule_stream.synchronize()  # kv_to_page_indices copies from the GPU
            self._receiver.send_metadata(kv_to_page_indices(self.allocator.alloc(SLOTS), 1), 0)
            self.told["under way"] = not self.forward_stream.record_event().query()
            self.told["at once"] = self.told["receives"] > 0
            if self._leaves:
                self._receiver.abort()
                self.told["quiet"] = self._receiver.quiet

    def get_next_disagg_decode_batch_to_run(self, running_batch: Any) -> Any:
        ended = self.allocator.available_size() or self._receiver is not None
        batch = None if ended else SimpleNamespace(copy=lambda: None, number=self._turn)
        return SimpleNamespace(running_batch=running_batch, batch_to_run=batch)

    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> bool:
        return False

    def run_batch(self, batch: Any) -> Any:
        runner = self.model_worker.last_shared_read_runner
        self.forward_stream.give(lambda: None)  # the step reads memory of the scheduler's
        if self._graphs:
            runner.shared_read_done_event = self.forward_stream.record_event()
        slot = self.slots[batch.number].item()
        self.forward_stream.give(lambda: self.cache.update({slot: LATE}))
        return self.forward_stream.record_event()

    def process_batch_result(self, batch: Any, result: Any) -> None:
        result.synchronize()
        if self.allocator.available_size() == 0 and self._receiver is None:
            self.allocator.free(self.slots)

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None:
        pass

    def on_idle(self) -> None:
        pass


def run(**scene: bool) -> dict[str, Any]:
    engine = Engine(**scene)
    if scene.get("overlap", True):
        engine.event_loop_overlap_disagg_decode()
    else:
        engine.event_loop_normal_disagg_decode()
    engine.forward_stream.reach(engine.forward_stream.record_event()._place)
    return engine.told | {"holds": sorted(set(engine.cache.values()))}


def main() -> None:
    load_plugins()
    scenes = {
        "graphs": {"graphs": True}, "eager": {"graphs": False}, "leaves": {"graphs": True, "leaves": True},
        "no overlap": {"graphs": True, "overlap": False},
    }  # fmt: skip
    print(json.dumps({name: run(**scene) for name, scene in scenes.items()}))


main()
