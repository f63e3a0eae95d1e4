"""The manager, which SGLang makes once per rank, and the place where decode finds prefill."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, BaseKVManager, KVArgs, StateType
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

from kvferry.errors import Conflict
from kvferry.handoff import Remembered
from kvferry.schemas import MAX_METADATA, SourceBody
from kvferry.sglang.answer import answer
from kvferry.sglang.bootstrap import Prefill, Sources
from kvferry.sglang.rank import this_rank, unsupported

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from kvferry.sglang.receiver import Receiver
    from kvferry.sglang.sender import Sender

PREFILL = PrefillServerInfo(
    attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None, kv_cache_dtype=None,
    follow_bootstrap_room=True,
)  # fmt: skip
"""The answer that SGLang wants of an engine that prefills: any rank may ask it."""
REFUSED = (
    "enable_memory_saver", "enable_kv_cache_sharding", "elastic_ep_backend", "enable_pd_role_switch",
    "disaggregation_enable_kv_checksum", "enable_linear_replayssm", "enable_linear_replayssm_spec",
)  # fmt: skip
"""Options of SGLang that move a cache or divide it in a way that no manifest says, let ranks come and go, compare
what is not moved (the rest of a page behind its last token), or keep steps beside a state that it has not taken in."""


class Manager(BaseKVManager):
    """Describes the rank's cache to its daemon."""

    enable_deferred_decode_kv_release = True
    """SGLang keeps a failed request's blocks until `is_abort_release_safe`."""

    def __init__(self, args: KVArgs, mode: DisaggregationMode, arguments: ServerArgs, *_: object) -> None:
        _check(args, mode, arguments)
        self.kv_args, self.rank = args, this_rank()
        self.rank.register(arguments, args.kv_cache_dtype_str)
        self.senders: WeakValueDictionary[int, Sender] = WeakValueDictionary()
        """By room. Only this one publishes what a room names and takes it back: a client may send a room twice."""
        self.timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        """How long decode waits for a request's KV."""
        self.prefill_info_table: Remembered[PrefillServerInfo] = Remembered()
        """The key is the bootstrap address."""
        self.sources = Sources()
        self._draining: defaultdict[int, list[Receiver]] = defaultdict(list)
        """Receivers that have failed, by room: SGLang keeps their blocks until they are quiet."""
        if mode is DisaggregationMode.PREFILL and (rank := self.rank).number == 0:
            source = SourceBody(engine_id=rank.engine_id, address=rank.daemon.peer_address)
            said = Prefill(sources=[source], kv_cache_dtype=args.kv_cache_dtype_str, encoding=rank.encoding)
            answer(get_serving().host, get_disagg().disaggregation_bootstrap_port, rank.dp_number, rank.dp_count, said)

    def register_to_bootstrap(self) -> None:
        """There is nothing to do: rank 0 of each DP rank answers by itself."""

    def aux_rows(self, index: int) -> list[tuple[int, int]]:
        """The place of a request's first token and of what goes with it: (address, nbytes) of each row."""
        args = self.kv_args
        return [(at + n * index, n) for at, n in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)]

    def try_ensure_parallel_info(self, address: str) -> bool:
        """Whether it is known which engine prefills at a bootstrap address. Called by decode's scheduler, which must
        not wait for an engine that is gone."""
        if (prefill := self.sources.ensure(address)) is not None:
            self.prefill_info_table[address] = replace(PREFILL, dp_size=len(prefill.sources))
        return prefill is not None

    def source(self, address: str, dp_rank: int) -> SourceBody | None:
        """The engine that is this DP rank at a bootstrap address, where it is known. Raises KvferryError
        (`other_cache_type`, `unknown_dp_rank`).

        SGLang's own check of cache types ends decode's scheduler, and takes `auto` and `bf16` for different ones.
        """
        prefill, ours = self.sources.known.get(address), self.rank.encoding
        if prefill is not None and prefill.encoding != ours:
            theirs = f"{prefill.kv_cache_dtype} ({prefill.encoding})"
            why = f"prefill at {address} has a cache of {theirs}, decode of {self.kv_args.kv_cache_dtype_str} ({ours})"
            remedy = "start both engines with the same --kv-cache-dtype"
            raise Conflict("other_cache_type", why, field="kv_cache_dtype", value=theirs, remedy=remedy)
        if prefill is not None and dp_rank not in range(len(prefill.sources)):
            why, name = f"prefill at {address} has DP ranks 0 to {len(prefill.sources) - 1}", "disagg_prefill_dp_rank"
            raise Conflict("unknown_dp_rank", why, field=name, value=dp_rank, remedy="name one of them, or none")
        return prefill.sources[dp_rank] if prefill is not None else None

    def forget(self, address: str) -> None:
        """A receive from there has failed: another engine may be there by now."""
        self.sources.forget(address)
        self.prefill_info_table.pop(address, None)

    def submit_prefill_recompute(self, receiver: Receiver, payload: dict[str, Any]) -> None:
        """SGLang wants the KV of a request that it has retracted computed again: not supported."""
        receiver.abort()

    # SGLang asks these until a failed request's blocks may be used again, by room. A client may send a room twice.

    def drain(self, room: int, receiver: Receiver) -> None:
        self._draining[room].append(receiver)

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        return all(receiver.quiet for receiver in self._draining.get(room, ()))

    def clear_deferred_abort_state(self, room: int) -> None:
        self._draining.pop(room, None)


class BootstrapServer(BaseKVBootstrapServer):
    """Nothing: SGLang makes it in another process than the schedulers', which answer themselves."""

    def __init__(self, host: str, port: int) -> None:
        pass


def _check(args: KVArgs, mode: DisaggregationMode, arguments: ServerArgs) -> None:
    """Raises KvferryError (`unsupported_engine`)."""
    parallel, disagg = get_parallel(), get_disagg()
    beside = sum(args.aux_item_lens)
    states = [each.value for each in args.state_types if each not in (StateType.SWA, StateType.MAMBA)]
    several = mode is DisaggregationMode.PREFILL and parallel.num_dp_ranks > 1
    refused = {
        "pipeline parallelism of decode": mode is DisaggregationMode.DECODE and parallel.pp_size > 1,
        "prefill's DP ranks on several hosts": several and parallel.nnodes > 1,
        f"--load-balance-method {parallel.load_balance_method} of prefill's DP ranks":
            several and parallel.load_balance_method != "follow_bootstrap_room",
        "context parallelism": max(parallel.attn_cp_size, parallel.dcp_size) > 1,
        f"{beside} bytes beside a request's KV (a draft model's hidden states): more than {MAX_METADATA}":
            beside > MAX_METADATA,
        f"states ({', '.join(states)})": bool(states),
        "--disaggregation-decode-allocation-policy prefill_complete":
            disagg.disaggregation_decode_allocation_policy != "early",
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        **{f"--{name.replace('_', '-')}": getattr(arguments, name) for name in REFUSED},
    }  # fmt: skip
    if asked := [what for what, holds in refused.items() if holds]:
        raise unsupported(", ".join(asked))
