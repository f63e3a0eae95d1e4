"""All parts of an attempt are of one lease: on all source ranks, and on all ranks of the engine that reads."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.errors import Conflict, KvferryError
from kvferry.protocol.reading import Following
from kvferry.protocol.transfer_events import LeaseId, Range, Wanted


def check_ordered(wanted: Wanted, lease: LeaseId) -> None:
    """The lease that all source ranks have is the one that was ordered. Raises KvferryError (`lease_changed`)."""
    epoch, number = lease
    if wanted.lease not in (0, number) or wanted.epoch not in ("", epoch):
        named = f"lease {wanted.lease} of epoch {wanted.epoch or 'any'}"
        why = f"{named} was ordered, and the source has sent {number} of epoch {epoch}"
        raise lease_changed(wanted.request_id, why)


def check_first(wanted: Wanted, first: LeaseId, read: LeaseId) -> None:
    """Rank 0 reads what was read here. Raises KvferryError (`lease_changed`)."""
    if first != read:
        ours, theirs = f"lease {read[1]} of epoch {read[0]}", f"lease {first[1]} of epoch {first[0]}"
        raise lease_changed(wanted.request_id, f"rank {wanted.rank} has read {ours}, rank 0 {theirs}")


def lease_changed(request_id: str, why: str) -> KvferryError:
    """The error for an attempt whose parts read different leases."""
    remedy = "try again, in a new attempt: the request was published anew meanwhile"
    return Conflict("lease_changed", why, field="request_id", value=request_id, remedy=remedy)


def check_one_prompt(readings: Mapping[int, Following]) -> None:
    """The ranks have published one prompt, as its digest says. Raises KvferryError."""
    if len({each.seen.digest for each in readings.values()}) > 1:
        by_rank = ", ".join(f"rank {rank} {each.seen.digest.hex() or 'none'}" for rank, each in readings.items())
        why = "the source ranks published different prompts under one id, as their digests say"
        remedy = "all ranks of an engine publish one prompt, with its digest, under a request's id"
        raise Conflict("ranks_disagree", why, field="digest", value=by_rank, remedy=remedy)


def check_published(readings: Mapping[int, Following], wanted: Range | None) -> None:
    """All that is wanted has been published, by all ranks alike. Raises KvferryError."""
    published = min(each.seen.num_tokens for each in readings.values())
    if wanted is not None and published < wanted[1]:
        why, remedy = f"only tokens up to {published} were published", f"ask for tokens up to {published}"
        raise Conflict("tokens_unpublished", why, field="token_range", value=f"{wanted[0]}:{wanted[1]}", remedy=remedy)
    if wanted is None and any(each.seen.num_tokens != published for each in readings.values()):
        by_rank = ", ".join(f"rank {rank} {each.seen.num_tokens}" for rank, each in readings.items())
        why = f"the source ranks published different numbers of tokens: {by_rank}"
        remedy = "all ranks of an engine publish the same tokens of a request"
        raise Conflict("ranks_disagree", why, field="num_tokens", value=published, remedy=remedy)
