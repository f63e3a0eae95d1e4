"""`kvferry explain --transfer`: which path a transfer took, why the others were not possible, and what it took."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from kvferry.errors import NotFound
from kvferry.schemas import PeerRecord, TransferRecord
from kvferryd import config as configuration
from kvferryd.commands import ask, say


async def explain_transfer(arguments: argparse.Namespace) -> int:
    """Ask the daemon for the transfer, by its id or by its request's, and say it. Raises KvferryError."""
    reach = configuration.reach({"token_file": arguments.token_file, "config": arguments.config})
    async with ask.client(reach, arguments) as daemon:
        records = await daemon.transfers()
        wanted = arguments.transfer
        found = [record for record in records if wanted in (record.transfer_id, record.request_id)]
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
        why_not = _why_not([peer for peer in await daemon.peers() if peer.engine_id == source])
    if arguments.json:
        print(json.dumps({"transfer": record.model_dump(mode="json"), "refused_ways": why_not}))
    else:
        print(outcome_text(record, why_not))
    return ask.DONE


def _why_not(peers: Sequence[PeerRecord]) -> dict[str, str]:
    """Ways that the pair cannot take."""
    return {way: why for peer in peers for way, why in peer.ways.items() if why}


def outcome_text(record: TransferRecord, why_not: Mapping[str, str]) -> str:
    """A record in words. why_not: ways that its pair cannot take, with the reason."""
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
    return "\n".join([*lines, "", say.printable(f"phases: {phases}")] if phases else lines)


def _row(record: TransferRecord, path: str, why_not: Mapping[str, str]) -> tuple[str, str, str]:
    if path == record.path:
        return path, say.duration(record.phases_ms.get("moving", 0.0)), "taken"
    return path, "-", f"cannot: {why_not[path]}" if path in why_not else "possible"
