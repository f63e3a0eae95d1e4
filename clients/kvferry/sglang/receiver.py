"""A request of a decode engine: its KV is received into blocks that SGLang has allocated."""

from __future__ import annotations

import contextlib
import ctypes
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvferry.blocking import Receipt
from kvferry.engine import Unsettled
from kvferry.errors import Conflict, KvferryError
from kvferry.handoff import Origin
from kvferry.sglang.cache import GROUP, tables_of
from kvferry.sglang.manager import PREFILL, Manager
from kvferry.sglang.prompt import ADDRESS, Prompt, handed_over, lease_of, number_of
from kvferry.sglang.sender import reason
from kvferry.tables import Tables

if TYPE_CHECKING:
    import numpy.typing as npt
    from sglang.srt.managers.schedule_batch import Req


TOLD_S = 1.0
"""The longest that an answer about a failure waits for this rank's own reason."""


class Receiver(BaseKVReceiver):
    """Fails at once, so that the client is told; its blocks are SGLang's again when it is `quiet`."""

    bootstrap_infos = (None,)
    """SGLang counts these: one answer of `is_abort_release_safe` is waited for."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self.bootstrap_addr, self._room = mgr, bootstrap_addr, bootstrap_room or 0
        self._prompt, self.abort_notified = Prompt(0, b""), False
        self._origin: Origin | None = None
        self._first_token: int | None = None
        """Known where another kind of engine has prefilled; otherwise it comes with the KV."""
        self._aux = self._attempt = 0
        self._tables: Tables | None = None
        self._under_way: Any = None
        """A CUDA event behind the steps that may still write to these pages: a request that had them has ended."""
        self._receipt: Receipt | None = None
        self._quiesced: Future[None] | None = None
        self.conclude_state: int | None = None
        self._why = self._name = ""

    def bind(self, req: Req) -> None:
        """To the request whose KV is wanted, and whose number the attempt has."""
        self._prompt, self._attempt = Prompt.of(req, self.kv_mgr.rank.adapters), number_of(req)
        try:
            self._name = lease_of(req.bootstrap_room)
            if self.bootstrap_addr == ADDRESS:
                self.kv_mgr.prefill_info_table[ADDRESS] = PREFILL
                self._origin, self._first_token = handed_over(req, self._prompt)
        except KvferryError as error:
            self._fail(reason(error))

    def init(self, prefill_dp_rank: int) -> None:
        try:
            if (source := self.kv_mgr.source(self.bootstrap_addr, prefill_dp_rank)) is not None:
                self._origin = Origin(self._name, self._prompt.num_tokens, source, digest=self._prompt.digest)
            elif self._origin is None:
                self.abort()
        except KvferryError as error:
            self._fail(reason(error))
            self.kv_mgr.forget(self.bootstrap_addr)

    def send_metadata(
        self, kv_indices: npt.NDArray[Any], aux_index: int | None = None, state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None, destination: KVTransferDestination = KVTransferDestination.DEVICE,
    ) -> None:  # fmt: skip
        """SGLang has allocated these pages for what follows the first `decode_prefix_len` tokens, which it has."""
        page_size, self._aux = self.kv_mgr.kv_args.page_size, aux_index or 0
        self._tables = tables_of(self._prompt.num_tokens, page_size, kv_indices, *(state_indices or ()))
        if (rank := self.kv_mgr.rank).on_gpu and rank.queue.scheduler.enable_overlap:
            self._under_way = rank.queue.scheduler.forward_stream.record_event()
        self._receive_once_written()

    def _receive_once_written(self) -> None:
        """Order the receive, unless this has failed or a step is still under way: SGLang polls again."""
        manager, origin, tables = self.kv_mgr, self._origin, self._tables
        if self.conclude_state is not None or tables is None or (self._under_way and not self._under_way.query()):
            return
        assert origin is not None
        self._tables, first = None, tables[GROUP].first_token
        try:
            if first and manager.rank.weights.replaced_since(manager.rank.cached_since):
                why = f"other weights, which have been replaced, computed the first {first} tokens, which are cached"
                raise Conflict("mixed_weights", why, remedy="flush the cache after each update")
            self._receipt = manager.rank.daemon.receive(
                origin.request_id, tables, (first, origin.num_tokens), source=origin.source,
                deadline_s=manager.timeout_s, digest=origin.digest, attempt=self._attempt,
            )  # fmt: skip
            manager.rank.idle.wake_after(self._receipt)
        except KvferryError as error:  # or the client is closed
            self._fail(reason(error))

    def poll(self) -> Any:
        self._receive_once_written()
        if self.conclude_state is None and self._receipt is not None and self._receipt.done():
            error = self._receipt.exception()
            if error is None:
                self._take(self._receipt.result().metadata)
            else:
                self._fail(reason(error))
                self.kv_mgr.forget(self.bootstrap_addr)
        if self.conclude_state is not None:
            return self.conclude_state
        if self._receipt is not None:
            return KVPoll.Transferring
        return KVPoll.Bootstrapping if self._origin is None else KVPoll.WaitingForInput

    def _take(self, metadata: bytes) -> None:
        """The first token and what goes with it, into the request's rows."""
        rows, at = self.kv_mgr.aux_rows(self._aux), 0
        if self._first_token is not None:
            metadata = bytes(sum(nbytes for _, nbytes in rows))
        if len(metadata) != sum(nbytes for _, nbytes in rows):
            why = f"{len(metadata)} bytes beside the KV, {sum(nbytes for _, nbytes in rows)} expected"
            self._fail(reason(Conflict("other_metadata", why, remedy="start both sides with one version of SGLang")))
            return
        for address, nbytes in rows:
            ctypes.memmove(address, metadata[at : at + nbytes], nbytes)
            at += nbytes
        if self._first_token is not None:
            buffers = self.kv_mgr.rank.queue.metadata_buffers
            buffers.output_ids[self._aux, 0], buffers.bootstrap_room[self._aux, 0] = self._first_token, self._room
        self.conclude_state = KVPoll.Success

    def _fail(self, why: str) -> None:
        """Unless it has ended before."""
        if self.conclude_state is None:
            self.conclude_state, self._why = KVPoll.Failed, why

    def abort(self) -> None:
        self._fail("it was aborted" if self._origin else f"no prefill engine answers at {self.bootstrap_addr}")
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """This has failed, here or on another rank: end the transfer, and let SGLang ask when it is quiet."""
        if self._receipt is not None and not self.abort_notified:
            self.abort_notified = True
            self._receipt.cancel()
            self.kv_mgr.drain(self._room, self)

    @property
    def quiet(self) -> bool:
        """Whether nothing is written to the blocks any more."""
        if self._receipt is None or not self._receipt.done():
            return self._receipt is None
        error = self._receipt.exception()
        if not isinstance(error, Unsettled) or error.blocks_safe:
            return True
        if self._quiesced is None:
            try:
                self._quiesced = self.kv_mgr.rank.daemon.start(error.quiesced())
            except KvferryError:  # the client is closed: it will never be known
                return False
        return self._quiesced.done() and self._quiesced.exception() is None

    def failure_exception(self) -> None:
        """Raises why this failed. A failure on another rank ends it here, too, and may be told here a moment later. The
        client gets the answer of one rank, which names another one only where it has no reason of its own."""
        if not self._why and self._receipt is not None:
            with contextlib.suppress(TimeoutError):
                if (error := self._receipt.exception(TOLD_S)) is not None:
                    self._why = reason(error)
        why = self._why or "it failed on another rank"
        raise KVTransferError(self._room, f"kvferry: {why}", is_from_another_rank=not self._why)
