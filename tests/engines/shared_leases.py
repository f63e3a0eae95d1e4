"""Print what the connector's scheduler side orders where several requests come with one lease. Run by the Python that
vLLM is installed for.

.venv-engines/bin/python tests/engines/shared_leases.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from kvferry.handoff import Handoff
from kvferry.vllm import register
from kvferry.vllm.options import Options
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.step import Address

TOKENS, BLOCK = list(range(100, 132)), 16
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
FULL = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], SPEC)])
LEASE = Handoff(
    do_remote_prefill=True, remote_engine_id="p", remote_request_id="lease", remote_host="127.0.0.1", remote_port=9,
    remote_num_tokens=len(TOKENS),
).model_dump()  # fmt: skip


class Scheduler:
    """vLLM's, as far as the connector sees it."""

    def __init__(self, caches: KVCacheConfig = FULL) -> None:
        kv = KVTransferConfig(kv_connector="KvferryConnector", kv_role="kv_both", engine_id="d")
        self.side = SchedulerSide(VllmConfig(kv_transfer_config=kv), caches, Options())
        self._requests: dict[str, Request] = {}

    def comes(self, *names: str, tokens: Sequence[int] = TOKENS, params: Mapping[str, object] = LEASE) -> None:
        for name in names:
            more = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": dict(params)})
            self._requests[name] = Request(name, list(tokens), more, None)
            self.side.admit(self._requests[name])

    def schedules(self, name: str, cached: int = 0, fewer: int = 0) -> bool:
        """Whether the request reads; blocks are given to it where it does not have to wait. cached: tokens that are
        in the prefix cache. fewer: tokens at the end that vLLM will compute all the same."""
        request = self._requests[name]
        count, _ = self.side.loadable(request, cached)
        if count is not None:
            blocks = list(range(1, 1 + request.num_prompt_tokens // BLOCK))
            self.side.allocated(request, (blocks,), count - fewer)
        return bool(count)

    def arrives(self, name: str, *, well: bool = True) -> None:
        self.side.ended({name}, set() if well else {name})

    def publishes(self, name: str) -> None:
        self.schedules(name)
        self._requests[name].num_computed_tokens = len(TOKENS)
        self._requests[name].append_output_token_ids(7)
        self.ends(name, RequestStatus.FINISHED_LENGTH_CAPPED)

    def aborts(self, name: str) -> None:
        self.ends(name, RequestStatus.FINISHED_ABORTED)

    def ends(self, name: str, status: RequestStatus) -> None:
        self._requests[name].status = status
        self.side.finished(self._requests.pop(name), ([1, 2],))

    def step(self) -> dict[str, list[str]]:
        step = self.side.next_step(SchedulerOutput.make_empty(), lambda name: ([1, 2],))
        ordered = {"load": [load.request_id for load in step.load], "cancel": step.cancel}
        return ordered | {"release": [load.request_id for load in step.release]}


def main() -> None:
    register()
    told: dict[str, object] = {}

    answers = Scheduler()
    answers.comes("0_a", "1_a", "2_a")
    reads = [answers.schedules("0_a"), answers.schedules("1_a")]
    answers.arrives("0_a")
    reads += [answers.schedules("1_a", cached=32), answers.schedules("2_a", cached=32)]
    told["answers to one prompt"] = reads, answers.step()

    late = Scheduler()
    late.comes("a")
    late.schedules("a")
    late.arrives("a")
    late.comes("b")
    told["another request, late"] = late.schedules("b", cached=32), late.step()

    for lease in (1, 2):
        anew = Scheduler()
        anew.comes("a", params=LEASE | {"remote_lease": 1})
        anew.schedules("a")
        anew.arrives("a")
        anew.comes("b", params=LEASE | {"remote_lease": lease})
        told[f"another request, with lease {lease} after 1"] = anew.schedules("b"), anew.step()

    for asked in (False, True):
        leaves = Scheduler()
        leaves.comes("a", "b")
        leaves.schedules("a")
        if asked:
            leaves.schedules("b")
        leaves.aborts("b")
        told[f"another request leaves, {'waiting' if asked else 'queued'}"] = leaves.step()

    fails = Scheduler()
    fails.comes("a", "b")
    fails.schedules("a")
    fails.schedules("b")
    fails.arrives("a", well=False)
    fails.aborts("b")
    told["the last of them leaves"] = fails.step()

    for end in ("arrives", "leaves"):
        other = Scheduler()
        other.comes("a")
        other.comes("b", tokens=TOKENS[::-1])
        reads, steps = [other.schedules("a"), other.schedules("b")], [other.step()]
        if end == "leaves":
            other.aborts("a")
            reads.append(other.schedules("b"))
            steps.append(other.step())
        other.arrives("a", well=end == "arrives")
        reads.append(other.schedules("b"))
        told[f"another prompt, {end}"] = reads, [*steps, other.step()]

    for names in (("0", "1"), ("0_0", "1_0")):
        publishes = Scheduler()
        publishes.side.reached_at({(0, 0): Address("127.0.0.1:9")})
        publishes.comes(*names, params={"do_remote_decode": True})
        for name in names:
            publishes.publishes(name)
        told[f"published as {names[0]} and {names[1]}"] = publishes.side._step.unread

    part = Scheduler()
    part.comes("a")
    part.schedules("a", fewer=BLOCK)
    (load,) = part.side._step.load
    told["fewer than there are"] = load.tokens, load.tables["0"].first_token, load.tables["0"].block_ids.tolist()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
