"""Leases on the wire and in records."""

from __future__ import annotations

from kvferry.protocol.values import Account, ReaderId, View
from kvferry.schemas import LeaseReader, LeaseRecord
from kvferry.v1 import peer_pb2
from kvferry.wire import tables_to_proto


def reader_id(reader: peer_pb2.Reader) -> ReaderId:
    return ReaderId(reader.engine_id, reader.epoch, reader.rank, reader.world_size, reader.key)


def update_of(view: View, word_address: int) -> peer_pb2.LeaseUpdate:
    said, terms = view.said, view.terms
    return peer_pb2.LeaseUpdate(
        tables=tables_to_proto(said.tables), num_tokens=said.num_tokens, more=said.more, metadata=said.metadata,
        word_address=word_address, word=terms.word, version=view.version, lease=terms.number, digest=said.digest,
        weights=said.weights, fenced_s=view.fenced_s,
    )  # fmt: skip


def record_of(account: Account, engine_id: str, epoch: str) -> LeaseRecord:
    """engine_id, epoch: of the engine that publishes."""
    readers = [
        LeaseReader(
            engine_id=it.who.engine_id, epoch=it.who.epoch, rank=it.who.rank, world_size=it.who.world_size,
            state=it.state, bytes=it.nbytes, attempt=it.attempt, opened_ms=_ms(it.times.opened),
            packed_ms=_ms(it.times.packed), closed_ms=_ms(it.times.closed),
        )
        for it in account.readers
    ]  # fmt: skip
    left_s = account.expires_in_s
    return LeaseRecord(
        request_id=account.request_id, lease=account.number, engine_id=engine_id, epoch=epoch, state=account.state,
        num_tokens=account.num_tokens, weights=account.weights, readers_expected=account.expected,
        readers_open=account.open, readers_closed=account.closed,
        expires_in_ms=None if left_s is None else 1e3 * left_s, created_at=account.created_at,
        ended_at=account.ended_at, age_ms=round(1e3 * account.age_s, 3), shown_ms=_ms(account.shown_s),
        reason=account.reason, bytes=account.nbytes, readers=readers,
    )  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
