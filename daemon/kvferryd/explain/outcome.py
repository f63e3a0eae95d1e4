"""`kvferry explain --transfer`: which path a transfer took, why the others were not possible, and what it took."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from kvferry.errors import NotFound
from kvferry.schemas import PeerRecord, TransferRecord
from kvferryd import config as configuration
from kvferryd.commands import ask, say
from kvferryd.observe.waits import others

MOST = 10_000
"""Records that are looked through: as many as the daemon lists."""
NAMED = 4
"""Other requests that are named."""


async def explain_transfer(arguments: argparse.Namespace) -> int:
    """Ask the daemon for the transfer, by its id or by its request's, and say it. Raises KvferryError."""
    reach = configuration.reach({"token_file": arguments.token_file, "config": arguments.config})
    async with ask.client(reach, arguments) as daemon:
        records = await daemon.transfers(limit=MOST)
        wanted = arguments.transfer
        found = records_of(wanted, records)
        if not found:
            raise NotFound(
                "unknown_transfer",
                f"the daemon at {daemon.url} knows no transfer and no request {wanted}",
                field="--transfer",
                value=wanted,
                remedy="kvferry transfers lists what it knows; the reader's daemon has the record",
            )
        record = found[-1]  # the daemon lists the oldest first
        source = record.source.engine_id if record.source else ""
        known = [peer for peer in await daemon.peers() if peer.engine_id == source]
        why_not = _why_not(known) if known else None
    if arguments.json:
        same = same_wait(record, records)
        told = {"transfer": record.model_dump(mode="json"), "refused_ways": why_not, "same_wait": same}
        print(json.dumps(told))
    else:
        print(outcome_text(record, why_not, records))
        if more := {each.request_id for each in found} - {record.request_id}:
            print(f"\n{say.printable(wanted)} begins {say.count(len(more), 'other request')}, too; this is the newest")
    return ask.DONE


def records_of(wanted: str, records: Sequence[TransferRecord]) -> list[TransferRecord]:
    """Records of this transfer or request. If there are none: records with an id that begins so."""
    exactly = [each for each in records if wanted in (each.transfer_id, each.request_id)]
    return exactly or [
        each
        for each in records
        if wanted and (each.transfer_id.startswith(wanted) or each.request_id.startswith(wanted))
    ]


def same_wait(record: TransferRecord, records: Sequence[TransferRecord]) -> list[str]:
    """Other requests that waited longest for the same thing at that time."""
    if record.waited_longest is None:
        return []
    every = [(each.request_id, each.waited_longest) for each in records if each.request_id != record.request_id]
    return list(dict.fromkeys(others(record.waited_longest, every)))


def _why_not(peers: Sequence[PeerRecord]) -> dict[str, str]:
    """Ways that the pair cannot take."""
    return {way: why for peer in peers for way, why in peer.ways.items() if why}


def waited_text(record: TransferRecord, records: Sequence[TransferRecord]) -> str:
    """The longest wait in a sentence, with others that waited for the same; empty where nothing was waited for."""
    if not record.why_slow:
        return ""
    same = same_wait(record, records)
    more = f" and {len(same) - NAMED} more" if len(same) > NAMED else ""
    return record.why_slow + (f"; others of that second: {', '.join(same[:NAMED])}{more}" if same else "")


def outcome_text(
    record: TransferRecord, why_not: Mapping[str, str] | None, records: Sequence[TransferRecord] = ()
) -> str:
    """A record in words. why_not: ways that its pair cannot take, with the reason; None if the source is not known any
    more. records: the others."""
    source = record.source.engine_id if record.source else "nobody yet"
    head = f"request {record.request_id}, from {source} to {record.engine_id}: {record.state.value}"
    if record.error:
        remedy = f" -> {record.error.remedy}" if record.error.remedy else ""
        head += f" ({record.error.code}: {record.error.message}{remedy})"
    moved = f"{say.size(record.bytes)} in {say.duration(record.phases_ms.get('total', 0.0))}"
    tokens = f", tokens {record.tokens[0]} to {record.tokens[1]} (excluded)" if record.tokens else ""
    transport = f" over {record.transport}" if record.transport else ""
    taken = f", {record.path}{transport}, {say.count(record.descriptors, 'descriptor')}" if record.path else ""
    rows = [_row(record, path, why_not) for path in configuration.WAYS if path != "auto"] if record.path else []
    heads = ("PATH", "TOOK", "")
    phases = ", ".join(f"{name} {say.duration(ms)}" for name, ms in record.phases_ms.items() if name != "total")
    ways = say.table(heads, rows, "nothing has moved")
    lines = [say.printable(head), say.printable(f"{moved}{tokens}{taken}"), "", ways]
    if waited := waited_text(record, records):
        lines[2:2] = [say.printable(waited)]
    return "\n".join([*lines, "", say.printable(f"phases: {phases}")] if phases else lines)


def _row(record: TransferRecord, path: str, why_not: Mapping[str, str] | None) -> tuple[str, str, str]:
    if path == record.path:
        return path, say.duration(record.phases_ms.get("moving", 0.0)), "taken"
    if why_not is None:
        return path, "-", "not known: the source is no peer any more"
    return path, "-", f"cannot: {why_not[path]}" if path in why_not else "possible"
