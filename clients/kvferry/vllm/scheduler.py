"""The connector in vLLM's scheduler: which requests are read from another engine, and which are kept for one."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import MambaSpec, is_full_attention_spec, iter_layer_specs
from vllm.v1.request import RequestStatus

from kvferry.errors import KvferryError
from kvferry.handoff import Handoff, Origin, Remembered, answer, lease_name
from kvferry.tables import BlockTable
from kvferry.vllm.identity import digest_of, names_content
from kvferry.vllm.missed import Missed
from kvferry.vllm.options import Options
from kvferry.vllm.step import Address, Load, Publish, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

log = init_logger("vllm.kvferry.scheduler")
NULL_BLOCK = 0
"""A block table's entry where a sliding window has passed; no request ever gets it."""
LATER_PROMPT = re.compile(r"(\d+_)?cmpl-.*-[1-9]\d*-[0-9a-f]{8}", re.DOTALL)
"""vLLM's ids of a body's second prompt and of later ones: cmpl-NAME-1-RANDOM, with several answers 0_cmpl-NAME-1-....
The kv_transfer_params of a body, and those of its answer, are the first prompt's."""
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(slots=True, eq=False)
class Exchange:
    """A request that is read from another engine, or published for one, until vLLM has finished it."""

    request: Request
    handoff: Handoff
    origin: Origin | None = None
    """The place to read its KV from; None once the read has begun."""
    problem: KvferryError | None = None
    """Why its kv_transfer_params cannot be followed."""
    computed: int = 0
    """How many of its first tokens the engine has already: the load begins after them."""
    waits: bool = False
    """It has waited for another request, which reads the lease that it came with."""
    lease: int = 0
    """The number of what is published of it; 0 where nothing is."""
    complete: bool = False
    """All that will ever be published has been."""
    digest: bytes = b""
    """The prompt's digest, once a part of it has been published."""
    begun: int = 0
    """The step with which it was last begun: none of its tokens had been computed."""
    loaded: int = 0
    """How many tokens have been read for it since then."""
    since: int = 0
    """The oldest step that may have computed any of its tokens; 0 before it is scheduled."""


@dataclass(slots=True, eq=False)
class Reading:
    """A load, as far as later requests that come with its lease have to know of it. Its blocks are none of theirs."""

    lease: str
    """The remote request's id."""
    prompt: str
    """The name that the answers to its request's prompt have in common."""
    digest: bytes
    number: tuple[str, str | None, int | None] | None
    """By `_number_of`."""
    under_way: bool = True
    """Until it has ended on every rank, though vLLM may have finished the request."""

    def has_read(self, origin: Origin) -> bool:
        """Or reads it: a lease that was published anew has another number."""
        return (self.digest, self.number) == (origin.digest, _number_of(origin))


class SchedulerSide:
    """Answers vLLM's scheduler, and gathers in a `Step` what the workers have to do."""

    def __init__(self, config: VllmConfig, caches: KVCacheConfig, options: Options) -> None:
        self._options = options
        self._parallel = config.parallel_config
        self._engine_id: str = config.kv_transfer_config.engine_id
        self._epoch: str = config.instance_id
        self._groups = [(group_id, caches.kv_cache_groups[group_id]) for group_id in caches.transfer_group_ids]
        dcp = self._parallel.decode_context_parallel_size
        specs = [group.kv_cache_spec for _, group in self._groups]
        self._spans = [spec.block_size * (dcp if spec.dcp_sharded else 1) for spec in specs]
        """Tokens for which all ranks have a block each, by group."""
        self._early = all(is_full_attention_spec(spec) for spec in specs)
        """Whether blocks stay a request's own until it ends. Others leave it as its window moves on."""
        self._digest = partial(digest_of, named=names_content(config))
        self._behind = int(caches.has_mamba_layers)
        """How many tokens before the prompt's end a prefill stops: decode computes the last, and no state goes back."""
        self._alone = True
        """No other connector is beside this one."""
        self._number = 1
        """The number of the step that is being made."""
        self._cached_since = self._external_since = 1
        """No older step has computed what the prefix cache has, or what another connector may have beside it."""
        self._empty = False
        """Nothing has come into the prefix cache since it was reset."""
        self._address = ""
        self._exchanges: dict[str, Exchange] = {}
        self._attempts = itertools.count(1)
        self._leases = itertools.count(1)
        self._expected: Remembered[bytes] = Remembered()
        """The digest of the last prompt that came with each remote request id."""
        self._answered: Remembered[str] = Remembered()
        """The last request to publish, by the name that vLLM gives to several answers to one prompt."""
        self._loading: dict[str, Reading] = {}
        """Reads under way, by request."""
        self._readings: Remembered[Reading] = Remembered()
        """The one under way, or the last one where all of it has arrived, by lease."""
        self._step = Step()
        self.missed = Missed()

    def reached_at(self, workers: Mapping[tuple[int, int], Address]) -> None:
        """Rank 0's daemon: from there the others are found."""
        self._address = workers[min(workers)].address

    def admit(self, request: Request) -> None:
        """A new request. Its kv_transfer_params come from a public body: they must not harm other requests."""
        params = request.kv_transfer_params
        if params is None or params == {} or request.request_id in self._exchanges:
            return
        if not isinstance(params, dict):
            request.kv_transfer_params = None  # vLLM reads it as a mapping
        if LATER_PROMPT.fullmatch(request.request_id):
            why = "its body's kv_transfer_params are those of the first prompt"
            self._missed(request.request_id, "several_prompts", why)
            return
        exchange = self._exchanges[request.request_id] = Exchange(request, Handoff())
        try:
            exchange.handoff = Handoff.parse(params)
            exchange.origin = self._origin(exchange.handoff, request)
        except KvferryError as error:
            exchange.problem = error
        if self._behind and exchange.handoff.do_remote_decode and request.num_prompt_tokens > 1:
            _shorten(request, self._behind)

    def _origin(self, handoff: Handoff, request: Request) -> Origin | None:
        """The source of a first part of the request's KV. Raises KvferryError."""
        if not handoff.reads:
            return None
        name = handoff.remote_request_id or lease_name(request.request_id)
        if getattr(request, "abort_immediately", False):
            # vLLM's server has refused the request, and reports it with a dummy prompt. Its KV will not be read, so its
            # lease is ended, unless the lease is another prompt's.
            handoff.remote_num_tokens = 0
            origin = handoff.origin(request.request_id, 0, bytes)
            return origin and replace(origin, digest=self._expected.get(name, b""))
        digest = self._expected[name] = self._digest(request, handoff.remote_num_tokens or request.num_prompt_tokens)
        return handoff.origin(request.request_id, request.num_prompt_tokens, lambda _: digest)

    def loadable(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first `computed` are read from elsewhere, between steps. Asked any number of times.

        A request that is refused asks for one token, which then fails to arrive: the one way vLLM has to end it.
        None: ask again later. Several answers to one prompt (`n`) come with one lease, which is read for the first; the
        others wait until that has ended, find in the prefix cache what it has read, and compute the rest. A request of
        another prompt waits too, and is refused by the source then: daemons know a load by the lease's name, and where
        ranks are in different loads of it one would be read into the blocks of the other.
        """
        exchange = self._exchanges.get(request.request_id)
        if exchange is None:
            return 0, False
        if (origin := exchange.origin) is not None and (reading := self._readings.get(origin.request_id)) is not None:
            if reading.under_way:
                exchange.waits = True
                return None, False
            if reading.has_read(origin):
                self._release(exchange)
        if exchange.lease:  # vLLM has taken its blocks back to reset the prefix cache
            self._revoke(exchange)
        exchange.begun, exchange.loaded, exchange.since = self._number, 0, 0
        exchange.computed = computed
        count = 1 if exchange.problem else self._reach(exchange.origin, request) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], external: int) -> None:
        """The request has blocks, `external` tokens of which are to be read. Comes again without any after that."""
        exchange = self._exchanges.get(request.request_id)
        if exchange is None:
            return
        if exchange.problem is not None:
            self._missed(request.request_id, "refused", str(exchange.problem))
            exchange.problem = None
            if external:
                self._step.refuse.append(request.request_id)
        elif exchange.origin is not None and external:
            start, stop = exchange.computed, exchange.computed + external  # vLLM may want fewer than there are
            tables = self._tables(block_ids, start, stop)
            tokens = start, max(stop, min(self._room(stop), exchange.origin.room))
            since = self._found_since(exchange, start)
            load = self._load(request, exchange.origin, tables, tokens, since)
            exchange.loaded = external
            self._step.load.append(load)
            lease, digest = load.origin.request_id, load.origin.digest
            reading = Reading(lease, _answers(request), digest, _number_of(load.origin))
            self._loading[request.request_id] = self._readings[reading.lease] = reading
            exchange.origin = None
        else:
            if exchange.origin is not None and exchange.origin.num_tokens and not self._reach(exchange.origin, request):
                why = "the state that was published is further than this request can use"
                self._missed(request.request_id, "computed", why)
            self._release(exchange)

    def ended(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """Loads that have ended on every rank, well or not. If vLLM is not to recompute what has failed, it finishes
        such a request just before: then there is nothing left to be cancelled."""
        for request_id in self._loading.keys() & set(request_ids):
            reading, lives = self._loading.pop(request_id), request_id in self._exchanges
            reading.under_way = False
            if left := request_id in self._step.cancel:
                self._step.cancel.remove(request_id)
            if request_id in failed and (lives or left):
                why = f"request {reading.lease} of the source was not read; the worker's log has the reason"
                self._missed(request_id, "failed", why)
            if (request_id in failed or not lives) and self._readings.get(reading.lease) is reading:
                del self._readings[reading.lease]  # the next request that comes with this lease reads it itself

    def _missed(self, request_id: str, reason: str, why: str) -> None:
        self.missed.add(reason)
        log.warning("request %s: nothing was handed over (%s): %s", request_id, reason, why)

    def next_step(self, output: SchedulerOutput, block_ids: Callable[[str], tuple[list[int], ...]]) -> Step:
        """The workers' part of this step. `block_ids`: a request's blocks by group."""
        for request_id in output.preempted_req_ids or ():
            if (exchange := self._exchanges.get(request_id)) is not None:
                self._revoke(exchange)
        for request_id, count in output.num_scheduled_tokens.items():
            exchange = self._exchanges.get(request_id)
            if exchange is not None and not exchange.since:
                exchange.since = self._since(exchange)
            if exchange is not None and exchange.handoff.do_remote_decode and self._early and not exchange.complete:
                self._computing(exchange, exchange.request.num_computed_tokens + count, block_ids)
        step, self._step = self._step, Step()
        step.number = self._number
        self._number += 1
        step.idle = not output.num_scheduled_tokens
        self._empty = self._empty and step.idle and not step.load
        if self._empty:
            self._cached_since = self._number
        return step

    def _since(self, exchange: Exchange) -> int:
        """The oldest step that may have computed any token of a request that is scheduled for the first time."""
        return self._found_since(exchange, exchange.request.num_computed_tokens - exchange.loaded)

    def _found_since(self, exchange: Exchange, count: int) -> int:
        """The same of so many tokens that the engine had when the request was begun."""
        if count <= 0:
            return exchange.begun
        return min(exchange.begun, self._cached_since, exchange.begun if self._alone else self._external_since)

    def watch(self, caches: KVCacheManager) -> None:
        """Know from now on when the prefix cache has been reset: with a connector or, as vLLM does it by default,
        without; and only where it has been, as blocks that requests have keep it from being. Windows keep what the
        newest token looks back at: a decode computes a prompt's last token anew, though all of its KV has come."""
        reset = caches.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            done: bool = reset()
            if done:
                self._cached_since, self._empty = self._number, True
            return done

        caches.reset_prefix_cache = reset_prefix_cache
        for manager in caches.coordinator.single_type_managers:
            if isinstance(manager, SlidingWindowManager | ChunkedLocalAttentionManager):
                manager.get_num_skipped_tokens = partial(_passed, manager.get_num_skipped_tokens)

    def joined(self) -> None:
        """Other connectors are beside this one."""
        self._alone = False

    def others_emptied(self) -> None:
        """Other connectors have forgotten what they had."""
        self._external_since = self._number

    def _computing(self, exchange: Exchange, reached: int, block_ids: Callable[[str], tuple[list[int], ...]]) -> None:
        """A step that takes the request to `reached` tokens: publish with it what no later step will add to."""
        request = exchange.request
        prompt = request.num_prompt_tokens
        if request.max_tokens > 1:  # a lease begins with the digest of all that it will hold
            return
        last = reached >= prompt
        if not last and not self._options.progressive:
            return
        end = min(reached, prompt)
        tables = self._tables(block_ids(request.request_id), 0, end)
        exchange.digest = exchange.digest or self._digest(request, prompt)
        num_tokens = self._room(end) if last else end
        self._step.computed.append(self._publish(exchange, tables, num_tokens, exchange.digest, last=last))
        exchange.complete = last

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks wait for readers, the answer's kv_transfer_params). vLLM waits for loads under way."""
        exchange = self._exchanges.pop(request.request_id, None)
        if exchange is None:
            return False, None
        if request.request_id in self._loading:
            self._step.cancel.append(request.request_id)
        self._release(exchange)
        handoff = exchange.handoff
        again = self._options.second_turn and not self._behind  # a state may be some tokens ahead of num_tokens
        keep = handoff.do_remote_decode or (handoff.do_remote_prefill and again)
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)  # the newest token has no KV yet
        if self._behind and request.max_tokens > 1:  # a prompt of one token, which nothing has stopped
            num_tokens = 0
        if self._early:
            held = (block_ids[group_id] for group_id, _ in self._groups)
            num_tokens = min(num_tokens, *map(_before_a_hole, held, self._spans))
        if not keep or request.status not in COMPLETE or num_tokens < 1:
            if handoff.do_remote_decode and request.status in COMPLETE:
                self._missed(request.request_id, "unpublished", "it has no token whose KV could be read")
            self._revoke(exchange)
            return False, None
        room = self._room(num_tokens)
        first = None if self._behind else request.all_token_ids[num_tokens]
        if not exchange.complete:
            metadata = json.dumps({"first_token": first}).encode() if first is not None else b""
            tables = self._tables(block_ids, 0, num_tokens)
            digest = self._digest(request, num_tokens)
            self._step.finished.append(self._publish(exchange, tables, room, digest, last=True, metadata=metadata))
        self._step.hold.append(request.request_id)
        if (prompt := _prompt_of(request.request_id)) != request.request_id:
            # The client gets the kv_transfer_params of the answer that ends last.
            if (before := self._answered.get(prompt)) is not None:
                self._step.unread.append(before)
            self._answered[prompt] = request.request_id
        return True, answer(
            engine_id=self._engine_id, epoch=self._epoch, address=self._address, request_id=request.request_id,
            lease=exchange.lease, block_ids=[block_ids[group_id] for group_id, _ in self._groups],
            num_tokens=num_tokens, room=room, tp=self._parallel.tensor_parallel_size,
            second_turn=not handoff.do_remote_decode, first_token=first,
        ).model_dump()  # fmt: skip

    def _publish(
        self, exchange: Exchange, tables: dict[str, BlockTable], num_tokens: int, digest: bytes, *, last: bool,
        metadata: bytes = b"",
    ) -> Publish:  # fmt: skip
        """A publish of the request's lease, which has its number from the first publish on."""
        exchange.lease = exchange.lease or next(self._leases)
        return Publish(
            exchange.request.request_id, exchange.lease, tables, num_tokens, last, digest, exchange.since, metadata
        )

    def _revoke(self, exchange: Exchange) -> None:
        if exchange.lease:
            self._step.revoke.append(exchange.request.request_id)
            exchange.lease, exchange.complete = 0, False

    def _release(self, exchange: Exchange) -> None:
        """Nothing will be read: let the source end the lease, which may be a new one of a name that was read before.
        Not one that another request reads, or has read: that is over with it, or would end with this."""
        origin, exchange.origin = exchange.origin, None
        if origin is None:
            return
        if (reading := self._readings.get(origin.request_id)) is not None:
            waited = exchange.waits or reading.prompt == _answers(exchange.request)
            shared = reading.under_way or (waited and reading.has_read(origin))
        else:
            shared = False
        if not shared:
            nothing = {str(group_id): BlockTable.of([]) for group_id, _ in self._groups}
            tokens = origin.num_tokens, origin.num_tokens
            self._step.release.append(self._load(exchange.request, origin, nothing, tokens, self._number))

    def _load(
        self, request: Request, origin: Origin, tables: dict[str, BlockTable], tokens: tuple[int, int], since: int
    ) -> Load:
        return Load(request.request_id, origin, tables, tokens, next(self._attempts), since)

    def _tables(self, block_ids: tuple[list[int], ...], start: int, stop: int) -> dict[str, BlockTable]:
        """The blocks that hold tokens [start, stop), by group; of a sliding window those that it has not passed, of a
        state the one that is in after `stop` tokens."""
        tables = {}
        for (group_id, group), span in zip(self._groups, self._spans, strict=True):
            if _is_state(group):
                tables[str(group_id)] = BlockTable.of([block_ids[group_id][(stop - 1) // span]])
                continue
            first, ids = start // span, block_ids[group_id][: -(-stop // span)]
            while first < len(ids) and ids[first] == NULL_BLOCK:
                first += 1
            tables[str(group_id)] = BlockTable.of(ids[first:], first * group.kv_cache_spec.block_size)
        return tables

    def _room(self, tokens: int) -> int:
        """For how many the blocks that hold `tokens` have room: whole blocks are longer runs. Windows move exactly."""
        return min(-(-tokens // span) * span for span in self._spans) if self._early else tokens

    def _reach(self, origin: Origin | None, request: Request) -> int:
        """How many of the request's first tokens another engine has, in a way that can be used here."""
        if origin is None:
            return 0
        wanted = request.num_prompt_tokens - self._behind
        return 0 if self._behind and origin.num_tokens > wanted else min(origin.num_tokens, wanted)


def _passed(passed: Callable[[int], int], computed: int) -> int:
    """How many tokens a window has passed for the newest of `computed` ones. passed: the same for the next one."""
    return max(0, passed(computed - 1))


def _before_a_hole(ids: Sequence[int], span: int) -> int:
    """How many tokens full attention has in these blocks: a reference window (R-SWA) gives up some of them."""
    return (ids.index(NULL_BLOCK) if NULL_BLOCK in ids else len(ids)) * span


def _is_state(group: KVCacheGroupSpec) -> bool:
    return isinstance(next(iter(iter_layer_specs(group.kv_cache_spec))), MambaSpec)


def _shorten(request: Request, count: int) -> None:
    """As vLLM's own connectors do: it has no other way to stop a prefill before the prompt's end. A prompt is of token
    ids, of embeddings, or of both with a mask that tells which. All of them must stay equally long."""
    for tokens in (request.prompt_token_ids, request.prompt_is_token_ids, request._all_token_ids):
        if tokens is not None:
            del tokens[-count:]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-count]
    request.num_prompt_tokens -= count
    request.max_tokens = 1


def _number_of(origin: Origin) -> tuple[str, str | None, int | None] | None:
    """Engine, epoch and number of its lease, as far as they were told; None where a router names the source."""
    source = origin.source
    return None if source is None else (source.engine_id, source.epoch, source.lease)


def _answers(request: Request) -> str:
    """The name that the answers to the request's prompt have in common: of a length that may be kept, as a client may
    have given it."""
    return lease_name(_prompt_of(request.request_id))


def _prompt_of(request_id: str) -> str:
    """The common part of the names that vLLM gives to several answers to one prompt: 0_name, 1_name, ... Without a
    server vLLM names requests 0, 1, ..."""
    index, several, name = request_id.partition("_")
    return name if several and index.isdigit() else request_id
