"""`kvferry peers`: whom this daemon reads from, how they fare, and who reads here. Failing peers come first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from kvferry.errors import KvferryError
from kvferry.schemas import ErrorBody, InboundRecord, PeerList, PeerRecord, PeerRequest, PeerState, UnmetRecord
from kvferryd.commands.ask import DONE, NOT_SO, bad_argument, client
from kvferryd.commands.say import (
    as_json,
    count,
    duration,
    error_line,
    failed_line,
    moment,
    printable,
    rate,
    size,
    table,
)
from kvferryd.config import Config

UNMET, LOST = "unmet", "lost"
"""States of peers that are in lists of their own."""
HEADS = (
    "STATE", "ENGINE", "RANK", "ADDRESS", "PATH", "P50", "P99", "RATE", "READ", "TRANSFERS", "FAILURES", "LAST ERROR",
    "VERSION",
)  # fmt: skip
READERS = ("READER", "RANK", "ADDRESS", "READS", "READING", "LEASES", "BYTES", "SINCE")


async def peers(config: Config, arguments: argparse.Namespace) -> int:
    async with client(config, arguments) as daemon:
        if arguments.forget:
            await daemon.forget_peer(arguments.forget)
        if arguments.prewarm:
            await daemon.prewarm(_prewarm(arguments.prewarm))
        found = await daemon.neighbours()
    if arguments.json:
        as_json(found)
    else:
        print(peers_text(found))
    return NOT_SO if any(failing(found)) else DONE


def _prewarm(text: str) -> PeerRequest:
    engine_id, _, address = text.rpartition("@")
    try:
        return PeerRequest(engine_id=engine_id, address=address)
    except KvferryError:
        remedy = "write ENGINE@HOST:PORT, the address of any rank's peer service"
        raise bad_argument("--prewarm", text, remedy) from None


def failing(found: PeerList) -> Iterator[str]:
    """The address of each peer that does not answer."""
    yield from (each.address for each in found.unmet)
    yield from (peer.address for peer in found.lost)
    yield from (peer.address for peer in found.peers if peer.state is PeerState.FAILING)


def peers_text(found: PeerList) -> str:
    """Two tables; below the first a line for each error, and one for each way that cannot be had."""
    known = sorted(found.peers, key=lambda peer: (peer.state is not PeerState.FAILING, peer.engine_id, peer.rank))
    states = [(LOST, peer) for peer in found.lost] + [(peer.state.value, peer) for peer in known]
    rows: list[Sequence[str]] = [
        (
            UNMET,
            each.engine_id or "-",
            _rank(each),
            each.address,
            "-",
            "-",
            "-",
            "-",
            "-",
            "-",
            str(each.failures),
            each.last_error.code,
            "-",
        )
        for each in found.unmet
    ]
    rows += [_row(state, peer) for state, peer in states]
    lines = [table(HEADS, rows, "no peers yet", bad=(UNMET, LOST, PeerState.FAILING.value))]
    lines += [_error(_named(each), each.failures, each.last_error, each.last_error_at) for each in found.unmet]
    lines += [
        _error(f"{peer.engine_id} rank {peer.rank} at {peer.address}", peer.failures, error, peer.last_error_at)
        for _, peer in states
        if (error := peer.last_error) is not None
    ]
    cannot = {(peer.engine_id, way, why): None for peer in known for way, why in peer.ways.items() if why}
    lines += [f"{engine_id}: {way} cannot be had: {why}" for engine_id, way, why in cannot]
    lines += [_phases(peer) for peer in known if peer.phases]
    lines += [f"{each.engine_id}: last failure: {failed_line(each)}" for each in found.failed]
    shown = [lines[0], *map(printable, lines[1:])]
    if found.inbound:
        readers = sorted(found.inbound, key=lambda reader: (reader.engine_id, reader.rank))
        shown += ["", table(READERS, [_reader(each) for each in readers], "")]
    return "\n".join(shown)


def _rank(unmet: UnmetRecord) -> str:
    return "-" if unmet.rank is None else str(unmet.rank)


def _named(unmet: UnmetRecord) -> str:
    whom = f"{unmet.engine_id} rank {unmet.rank} at " if unmet.engine_id else ""
    return f"{whom}{unmet.address}"


def _row(state: str, peer: PeerRecord) -> tuple[str, ...]:
    took = (duration(ms) if ms is not None else "-" for ms in (peer.p50_ms, peer.p99_ms))
    error = peer.last_error.code if peer.last_error else "-"
    return (
        state, peer.engine_id, str(peer.rank), peer.address, peer.path or "-", *took, rate(peer.bytes_per_s),
        size(peer.bytes_read), str(peer.transfers), str(peer.failures), error, peer.version or "-",
    )  # fmt: skip


def _phases(peer: PeerRecord) -> str:
    """p99 of the last 100 transfers, and the worst of five minutes, by phase."""
    said = (f"{name} {duration(each.p99_ms)}/{duration(each.worst_ms)}" for name, each in peer.phases.items())
    return f"{peer.engine_id} rank {peer.rank}: p99 of the last 100/worst of 5 min: {', '.join(said)}"


def _error(whom: str, failures: int, error: ErrorBody, at: float | None) -> str:
    since = f"{count(failures, 'failure')} in a row, the last" if failures else "it answers; this was"
    return f"{whom} ({since} at {moment(at)}): {error_line(error)}"


def _reader(reader: InboundRecord) -> tuple[str, ...]:
    address = reader.address.removeprefix("ipv4:").removeprefix("ipv6:")
    return (
        reader.engine_id, f"{reader.rank}/{reader.world_size}", address, reader.source, str(reader.reading),
        str(reader.leases), size(reader.bytes), moment(reader.since),
    )  # fmt: skip
