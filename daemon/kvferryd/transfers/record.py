"""Records of a transfer: this rank's share, that of all ranks, and errors."""

from __future__ import annotations

from kvferry.protocol.states import STEP
from kvferry.schemas import Awaited, ErrorBody, RankTransfer, TransferRecord, TransferState, Wait
from kvferryd.observe.waits import longest, sentence
from kvferryd.transfers.transfer import Transfer

OF_ANOTHER = frozenset({"rank_failed", "aborted"})
"""Errors of a rank that has ended because another has."""

GIVEN = frozenset({Awaited.ORDER, Awaited.RESERVATION, Awaited.PUBLISH, Awaited.FENCE})
"""Waits for engines and routers, which make no transfer slow."""


def share_of(transfer: Transfer) -> RankTransfer:
    """This rank's part, as it stands."""
    course, path = transfer.course, transfer.course.path
    moving_ms = course.ms.get("moving", 0.0)
    return RankTransfer(
        rank=transfer.own.rank,
        state=transfer.state,
        bytes=transfer.nbytes,
        descriptors=course.descriptors,
        path=path.value if path else "",
        transport=course.transport,
        phases_ms=course.told(),
        bytes_per_s=round(1e3 * transfer.nbytes / moving_ms) if moving_ms else 0.0,
        took_ms=course.took_ms if transfer.state.ended else None,
        waits_for=transfer.waits_for,
        waits=course.waits.told(course.created_at, course.began),
        error=ErrorBody.of(transfer.problem) if transfer.problem else None,
    )


def record_of(transfer: Transfer, own: RankTransfer | None = None) -> TransferRecord:
    """own: this rank's share as it stands, if it is at hand."""
    own = own or share_of(transfer)
    ranks = sorted([own, *transfer.ranks.values()], key=lambda share: share.rank)
    slowest = min(ranks, key=_lead)
    waited = longest(slowest, own, transfer.course.created_at)
    return TransferRecord(
        transfer_id=transfer.transfer_id,
        request_id=transfer.request_id,
        engine_id=transfer.own.engine_id,
        source=transfer.order.source if transfer.order else None,
        state=transfer.state_of_all,
        bytes=sum(share.bytes for share in ranks),
        descriptors=sum(share.descriptors for share in ranks),
        path=next((share.path for share in ranks if share.path), ""),
        transport=next((share.transport for share in ranks if share.transport), ""),
        tokens=transfer.tokens,
        attempt=transfer.attempt.number,
        lease=transfer.lease or None,
        slowest_rank=slowest.rank,
        took_ms=slowest.took_ms,
        phases_ms=slowest.phases_ms,
        bytes_per_s=slowest.bytes_per_s,
        waits_for=slowest.waits_for,
        waited_longest=waited,
        why_slow=why_slow(transfer, waited, slowest.rank),
        ranks=ranks,
        error=slowest.error or next((share.error for share in ranks if share.error), None),
        created_at=transfer.course.created_at,
        ended_at=transfer.course.over_at,
    )


def why_slow(transfer: Transfer, waited: Wait | None, rank: int) -> str:
    """The wait in a sentence; empty where nothing was waited for. rank: that waited."""
    if waited is None:
        return ""
    several = bool(transfer.ranks or rank) and waited.what not in (Awaited.ORDER, Awaited.RANK)
    source = transfer.order.engine_id if transfer.order else ""
    return sentence(waited, source, transfer.own.engine_id, rank if several else None)


def began_of(transfer: Transfer) -> dict[str, object]:
    """The fields of its record by which the next daemon names it, if this one dies."""
    source = transfer.order.source if transfer.order else None
    return {
        "transfer_id": transfer.transfer_id,
        "request_id": transfer.request_id,
        "engine_id": transfer.own.engine_id,
        "source": vars(source) if source else None,
        "state": TransferState.WAITING,
        "attempt": transfer.attempt.number,
        "slowest_rank": transfer.own.rank,
        "created_at": transfer.course.created_at,
    }


def json_of(transfer: Transfer, own: RankTransfer | None = None) -> bytes:
    """The record as JSON; own: as of `record_of`. Kept until something changes: many may look at many records."""
    made_of = transfer.nbytes, transfer.waits_for, transfer.attempt, transfer.lease
    if transfer.encoded is None or transfer.encoded[0] != made_of:
        transfer.encoded = made_of, record_of(transfer, own).model_dump_json().encode()
    return transfer.encoded[1]


def _lead(share: RankTransfer) -> tuple[bool, int, bool, float]:
    """For comparing ranks. The least is the rank that the request waits for; after the end the slowest, or the first to
    fail by itself."""
    ended = share.state.ended
    at = 0 if ended else STEP[share.state]
    its_own = share.error is not None and share.error.code not in OF_ANOTHER
    took_ms = share.took_ms or 0.0
    return ended, at, not its_own, took_ms if its_own else -took_ms
