"""A request of a prefill engine: published chunk by chunk, and watched until it has been read."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvferry.engine import Unsettled
from kvferry.errors import Conflict, KvferryError
from kvferry.memory.fences import Fence
from kvferry.schemas import LeaseState
from kvferry.sglang.cache import tables_of
from kvferry.sglang.prompt import Prompt, lease_of, number_of
from kvferry.tables import Tables

if TYPE_CHECKING:
    import numpy.typing as npt
    from sglang.srt.managers.schedule_batch import Req

    from kvferry.sglang.manager import Manager


def reason(error: BaseException) -> str:
    """The words for a client and the log."""
    return f"{error.code}: {error}" if isinstance(error, KvferryError) else str(error)


class Sender(BaseKVSender):
    """Publishes each chunk when it has been computed. It does not wait until decode asks for it.

    The scheduler calls, and waits only where it takes pages back: the daemon's answers come to the client's event loop.
    """

    _early_send_wait_event: Any = None
    """A CUDA event, set by SGLang when it sends what an earlier step may still be writing."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, **_: object) -> None:
        self.kv_mgr, self._room, self._daemon = mgr, bootstrap_room, mgr.rank.daemon
        self._prompt, self._why = Prompt(0, b""), ""
        self._pages: list[int] = []
        self._expected = self._aux = self._begun = 0
        self._began: float | None = None
        self._end: Future[LeaseState] | None = None
        """The end of the lease, once all of it has been sent."""
        self._state: int | None = None
        self._name, self._number, self._aborted = "", 0, False

    def bind(self, req: Req) -> None:
        """To the request whose prompt's KV this is, and whose number its lease has."""
        room, rank, dp_rank = self._room, self.kv_mgr.rank, req.disagg_prefill_dp_rank
        self._prompt, self._number = Prompt.of(req, rank.adapters), number_of(req)
        try:
            self._name = lease_of(room)
            if rank.dp_number != (room % rank.dp_count if dp_rank is None else dp_rank):
                why = f"room {room} came to DP rank {rank.dp_number}, and decode reads it at another one"
                remedy = "send prefill's routed_dp_rank in both legs as disagg_prefill_dp_rank, too"
                raise Conflict("other_dp_rank", why, field="disagg_prefill_dp_rank", value=dp_rank, remedy=remedy)
            if self.kv_mgr.senders.setdefault(room, self) is not self:
                why, remedy = f"room {room} is that of another request", "give each request a room of its own"
                raise Conflict("room_taken", why, field="bootstrap_room", value=room, remedy=remedy)
        except KvferryError as error:
            self._aborted = True
            self._fail(reason(error))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._expected, self._aux = num_kv_indices, aux_index or 0
        self._begun = self.kv_mgr.rank.weights.step + 1

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: npt.NDArray[Any], state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        """These pages are written. With the last ones goes the first token."""
        if self._aborted:
            return
        self._pages.extend(kv_indices.tolist())
        last, page_size = len(self._pages) >= self._expected, self.kv_mgr.kv_args.page_size
        if not last and self.kv_mgr.kv_args.state_types:  # the pages of windows come with the last ones
            return
        self._began = self._began or time.monotonic()
        num_tokens = self._prompt.num_tokens if last else len(self._pages) * page_size
        metadata = b"".join(ctypes.string_at(*row) for row in self.kv_mgr.aux_rows(self._aux)) if last else b""
        if self._early_send_wait_event is not None:
            self._early_send_wait_event.wait()
        rank, tables = self.kv_mgr.rank, tables_of(num_tokens, page_size, self._pages, *(state_indices or ()))
        weights = rank.weights.of(min(self._begun, rank.cached_since))  # the oldest step that computed any of it
        try:
            end = self._daemon.start(self._publish(tables, num_tokens, last, metadata, weights, rank.written()))
            if last:
                self._end = end
                rank.idle.wake_after(end)
        except KvferryError as error:  # the client is closed
            self._fail(reason(error))

    async def _publish(
        self, tables: Tables, num_tokens: int, last: bool, metadata: bytes, weights: str, after: Fence | None
    ) -> LeaseState:
        """Returns how the lease has ended, after the last publish."""
        try:
            if self._aborted:
                return LeaseState.REVOKED
            lease = await self._daemon.client.publish(
                self._name, tables, num_tokens, more=not last, metadata=metadata, after=after,
                digest=self._prompt.digest, lease=self._number, ttl_s=self.kv_mgr.rank.options.lease_ttl_s,
                withdraw=last, weights=weights,
            )  # fmt: skip
            return await lease.ended() if last else LeaseState.PUBLISHING
        except Unsettled as error:
            await error.quiesced()
            raise

    def poll(self) -> Any:
        if self._state is None and self._end is not None and self._end.done():
            error = self._end.exception()
            if error is None and self._end.result() is LeaseState.RELEASED:
                self._state = KVPoll.Success
            else:
                self._fail(reason(error) if error else f"its lease is {self._end.result()}, and was not read")
        if self._state is not None:
            return self._state
        return KVPoll.WaitingForInput if self._end is None else KVPoll.Transferring

    poll_pp_consensus = poll
    """A pipeline's first stage asks it for all of them before a request is computed: none of them waits then."""

    def _fail(self, why: str) -> None:
        self._state, self._why = KVPoll.Failed, why

    def abort(self) -> None:
        """SGLang takes the pages back when this returns, where not all of them have been sent; otherwise when this
        fails or succeeds. Raises SystemExit as `failure_exception`."""
        self._withdraw()
        if self._end is None and self._state is None:
            self._fail("it was aborted")

    def _withdraw(self) -> None:
        if self._aborted:
            return
        self.clear()
        try:
            told = self._daemon.start(self._daemon.client.withdraw(self._name))
            if self._began is not None:
                told.result()
        except Unsettled as error:
            raise SystemExit(f"kvferry: a reader may be in the pages of {self._name}: {error}") from None
        except KvferryError:  # refused, so there is no lease; or the client is closed, as the engine stops
            pass

    def clear(self) -> None:
        """SGLang has done with this: its room is free. The first stage of a pipeline may not be ahead of the others,
        where the lease may end later: a room that it gives to another request is free on all of them. They hear of ends
        and of requests from it, in its order."""
        self._aborted = True
        if self.kv_mgr.senders.get(self._room) is self:  # SGLang clears what it has aborted once more
            del self.kv_mgr.senders[self._room]

    def failure_exception(self) -> None:
        """Raises why this failed; on the other ranks, which end with it, that it was another one. SGLang takes their
        pages back then, so it waits until no reader can go on.

        Raises SystemExit where that is not known in time: a reader would be told that it has this prompt, when the
        pages hold another one by then."""
        self._withdraw()
        why = self._why or "it failed on another rank"
        raise KVTransferError(self._room, f"kvferry: {why}", is_from_another_rank=not self._why)

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(transfer_latency_s=time.monotonic() - self._began if self._began else None)
