"""Print what the connector's scheduler side does with requests that are unlike most. Run by the Python that vLLM is
installed for.

.venv-engines/bin/python tests/engines/odd_requests.py
"""

from __future__ import annotations

import gc
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import torch
from shared_leases import BLOCK, LEASE, SPEC, TOKENS, Scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, RSWASpec
from vllm.v1.request import Request, RequestStatus

from kvferry.vllm import register
from kvferry.vllm.connector import KvferryConnector
from kvferry.vllm.identity import digest_of
from kvferry.vllm.step import Address
from kvferry.vllm.weights import watch_core

COUNT = len(TOKENS)
STATE = MambaSpec(block_size=BLOCK, shapes=((2, 8),), dtypes=(torch.float32,))
HYBRID = KVCacheConfig(8, [], [KVCacheGroupSpec(["full"], SPEC), KVCacheGroupSpec(["state"], STATE)])

WINDOW = RSWASpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, rswa_window=BLOCK)
BEHIND = KVCacheConfig(8, [], [KVCacheGroupSpec(["full"], WINDOW)])


def request(tokens: list[int] | None, **more: Any) -> Request:
    asked = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    return Request("r", tokens, asked, None, **more)


def prefilled(one: Request) -> dict[str, Any]:
    """Prefilled by an engine whose model has a state."""
    side = Scheduler(HYBRID).side
    side.reached_at({(0, 0): Address("127.0.0.1:9")})
    whole = digest_of(one, COUNT - 1).hex()
    side.admit(one)
    assert side.loadable(one, 0) == (0, False)
    side.allocated(one, ([0, 1], [2, 3]), 0)
    one.append_output_token_ids(7)
    one.num_computed_tokens, one.status = one.num_prompt_tokens, RequestStatus.FINISHED_LENGTH_CAPPED
    keeps, params = side.finished(one, ([0, 1], [2, 3]))
    published = side._step.finished
    parts = one.prompt_token_ids, one.prompt_embeds, one.prompt_is_token_ids
    named = [each.digest.hex() for each in published] == [whole]
    lengths = {len(part) for part in parts if part is not None}
    return {
        "kept": keeps, "told": (params or {}).get("remote_num_tokens"), "lengths": sorted(lengths),
        "prompt": one.num_prompt_tokens, "names what was computed": named,
    }  # fmt: skip


def with_a_hole() -> dict[str, Any]:
    """64 tokens behind the prompt, of which the engine has kept the last 16."""
    side, one = Scheduler(BEHIND).side, request(list(TOKENS))
    side.reached_at({(0, 0): Address("127.0.0.1:9")})
    part = digest_of(one, COUNT).hex()
    side.admit(one)
    assert side.loadable(one, 0) == (0, False)
    side.allocated(one, ([1, 2],), 0)
    one.append_output_token_ids(list(range(65)))
    one.num_computed_tokens, one.status = COUNT + 64, RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = side.finished(one, ([1, 2, 0, 0, 0, 6],))
    (published,) = side._step.finished
    blocks = published.tables["0"].block_ids.tolist()
    told = (params or {}).get("remote_num_tokens")
    return {"blocks": blocks, "told": told, "names what is there": published.digest.hex() == part}


def ended_by_vllm(*, fails: bool) -> dict[str, Any]:
    """A load under way whose request vLLM ends with an error: since it failed, or for another reason."""
    scheduler = Scheduler()
    scheduler.comes("a")
    scheduler.schedules("a")
    scheduler.step()
    scheduler.ends("a", RequestStatus.FINISHED_ERROR)
    if fails:
        scheduler.arrives("a", well=False)
    cancelled = scheduler.step()["cancel"]
    if not fails:
        scheduler.arrives("a", well=False)
    return {"missed": scheduler.side.missed.data, "cancel": cancelled}


def emptied(*others: bool | None) -> bool:
    """Whether a prompt's beginning that another connector has after a reset counts as computed since then. others: what
    their resets answer; without an answer they do not know how."""
    scheduler, one = Scheduler(), request(list(TOKENS))
    watch_core()
    kvferry = object.__new__(KvferryConnector)
    kvferry._scheduler = scheduler.side
    several = object.__new__(MultiConnector)
    several._connectors = [kvferry, *map(beside, others)]
    caches = SimpleNamespace(
        block_pool=None, reset_prefix_cache=lambda: True, coordinator=SimpleNamespace(single_type_managers=())
    )
    several.bind_kv_cache_manager(caches)
    scheduler.step()
    caches.reset_prefix_cache()
    several.reset_cache()
    scheduler.side.admit(one)
    scheduler.side.loadable(one, 0)
    one.num_computed_tokens = BLOCK
    return scheduler.side._since(scheduler.side._exchanges["r"]) == scheduler.side._number


def beside(answer: bool | None) -> KVConnectorBase_V1:
    class Answers(OffloadingConnector):  # type: ignore[misc]
        def reset_cache(self) -> bool | None:
            return answer

    return object.__new__(ExampleConnector if answer is None else Answers)


def kept_of_loads(count: int, blocks: int) -> float:
    """Bytes that are kept of each load that has arrived, into so many blocks, and whose request is over."""
    scheduler, tokens = Scheduler(), list(range(blocks * BLOCK))

    def loads(first: int) -> None:
        for n in range(first, first + count):
            params = LEASE | {"remote_request_id": f"lease-{n}", "remote_num_tokens": len(tokens)}
            scheduler.comes(f"{n}", tokens=tokens, params=params)
            assert scheduler.schedules(f"{n}")
            assert scheduler.step()["load"] == [f"{n}"]
            scheduler.arrives(f"{n}")
            scheduler.aborts(f"{n}")

    loads(0)  # so that what is made once is there
    tracemalloc.start()
    loads(count)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / count


def main() -> None:
    register()
    rows = torch.arange(COUNT * 8, dtype=torch.bfloat16).view(COUNT, 8)
    told = {
        "tokens": prefilled(request(list(TOKENS))),
        "embeddings": prefilled(request(None, prompt_embeds=rows)),
        "both": prefilled(request(list(TOKENS), prompt_embeds=rows, prompt_is_token_ids=[i < 9 for i in range(COUNT)])),
        "a hole": with_a_hole(),
        "its load has failed": ended_by_vllm(fails=True),
        "its load is under way": ended_by_vllm(fails=False),
        "all are emptied": emptied(True),
        "one is not": emptied(True, False),
        "one cannot be": emptied(True, None),
        "kept of a load": kept_of_loads(count=64, blocks=512),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
