"""The commands that ask a daemon over REST, and how its answers are printed."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kvferry import __version__
from kvferry.errors import Malformed
from kvferry.router import RouterClient
from kvferry.schemas import DrainStatus, PeerRequest, TransferRecord, TransferState
from kvferryd.config import Config, bad_config

DONE, NOT_YET = 0, 1
PROGRESS_S = 5.0
"""A line of progress at least this often while draining."""
UNBROKEN = 1 << 16
"""Columns where the output is no terminal."""


def client(config: Config, arguments: argparse.Namespace) -> RouterClient:
    """The client of the daemon named by --daemon, else of this machine's."""
    url = arguments.daemon or config.url
    if "://" not in url:
        url = f"http://{url}"
    tls = _tls(config) if url.startswith("https:") else None
    name = f"kvferry/{__version__}; user {os.getuid()} at {socket.gethostname()}"
    return RouterClient(url, token=_token(config.token_file), tls=tls, name=name)


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
    return next(filter(None, lines), "")


def _tls(config: Config) -> ssl.SSLContext | None:
    """A daemon asks its clients for a certificate; ours is that of this machine's daemon."""
    if config.tls is None:
        return None
    certificate, key, authority = config.tls
    try:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        remedy = "tls_cert and tls_key are a pair, tls_ca the authority that signed the daemon's certificate"
        why = f"the certificates cannot be used: {error}"
        raise bad_config("tls_cert", certificate, why, remedy) from None
    return context


async def status(config: Config, arguments: argparse.Namespace) -> int:
    async with client(config, arguments) as daemon:
        ready = await daemon.ready()
        info, engines, left = await asyncio.gather(daemon.info(), daemon.engines(), daemon.drain_status())
    if arguments.json:
        _json({"ready": ready, "info": info, "engines": engines, "drain": left})
        return DONE if ready.ready else NOT_YET
    print(f"kvferry {info.version} at {daemon.url}: {'ready' if ready.ready else 'not ready'}")
    rows = [
        ("device", info.device),
        ("peers reach", info.advertise),
        ("engine socket", info.engine_socket),
        ("way", info.way + (", strict" if info.strict else "")),
        ("transports", ", ".join(info.transports) or "none yet"),
        ("up", duration(info.uptime_s * 1000)),
        ("left", f"{count(left.leases, 'lease')}, {count(left.transfers, 'transfer')}"),
    ]
    for line in (*ready.reasons, *ready.warnings, *(f"{name:<14} {value}" for name, value in rows)):
        print(f"  {printable(line)}")
    print(table(
        ("ENGINE", "RANK", "ATTACHED", "EPOCH", "GROUPS"),
        [
            (engine.engine_id, f"{engine.rank}/{engine.world_size}", "yes" if engine.attached else "no", engine.epoch,
             ", ".join(group_summary(group) for group in engine.manifest.get("groups", [])))
            for engine in engines
        ],
        "no engine has attached",
    ))  # fmt: skip
    for engine in engines:
        for note in engine.notes:
            print(printable(f"note on {engine.engine_id}: {note}"))
    return DONE if ready.ready else NOT_YET


async def transfers(config: Config, arguments: argparse.Namespace) -> int:
    state = _state(arguments.state)
    async with client(config, arguments) as daemon:
        while True:
            records = await daemon.transfers(arguments.request_id, state)
            if arguments.json:
                _json({"transfers": records})
            else:
                if arguments.watch is not None and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                print(transfer_table(records), flush=True)
            if arguments.watch is None:
                return DONE
            await asyncio.sleep(max(0.1, arguments.watch))


def _state(text: str | None) -> TransferState | None:
    try:
        return TransferState(text) if text else None
    except ValueError:
        raise _bad_argument("--state", text, f"one of {', '.join(TransferState)}") from None


def _bad_argument(flag: str, value: object, remedy: str) -> Malformed:
    return Malformed("bad_argument", f"{flag} cannot be understood", field=flag, value=value, remedy=remedy)


async def peers(config: Config, arguments: argparse.Namespace) -> int:
    async with client(config, arguments) as daemon:
        if arguments.forget:
            await daemon.forget_peer(arguments.forget)
        if arguments.prewarm:
            await daemon.prewarm(_prewarm(arguments.prewarm))
        records = await daemon.peers()
    if arguments.json:
        _json({"peers": records})
        return DONE
    rows = [
        (
            peer.engine_id, str(peer.rank), peer.address, str(peer.transfers), size(peer.bytes_read), peer.version,
            peer.epoch,
        )
        for peer in records
    ]  # fmt: skip
    print(table(("ENGINE", "RANK", "ADDRESS", "TRANSFERS", "READ", "VERSION", "EPOCH"), rows, "no peers yet"))
    return DONE


def _prewarm(text: str) -> PeerRequest:
    engine_id, _, address = text.rpartition("@")
    try:
        return PeerRequest(engine_id=engine_id, address=address)
    except ValueError:
        remedy = "write ENGINE@HOST:PORT, the address of any rank's peer service"
        raise _bad_argument("--prewarm", text, remedy) from None


async def drain(config: Config, arguments: argparse.Namespace) -> int:
    """The daemon holds each answer until nothing is left, at most PROGRESS_S; a line is printed at each change."""
    deadline, said = time.monotonic() + arguments.wait, ""
    async with client(config, arguments) as daemon:
        if arguments.status or arguments.cancel:
            left = await (daemon.cancel_drain() if arguments.cancel else daemon.drain_status())
            if arguments.json:
                _json(left)
            else:
                print(drain_line(left))
            return DONE if left.drained or arguments.cancel else NOT_YET
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            left = await daemon.drain(min(left_s, PROGRESS_S if said else 0.0))
            line = drain_line(left)
            if line != said and not arguments.json:
                print(line, flush=True)
            if left.drained or left_s == 0:
                break
            said = line
    if arguments.json:
        _json(left)
    print("kvferry: it takes no new transfers; `kvferry drain --cancel` ends that", file=sys.stderr)
    return DONE if left.drained else NOT_YET


def drain_line(left: DrainStatus) -> str:
    if left.drained:
        return "drained: no lease and no transfer is left"
    held = f"{count(left.leases, 'lease')}, {count(left.transfers, 'transfer')}"
    return f"draining: {held} left" if left.draining else f"not draining: {held} here"


COMMANDS: dict[str, Callable[[Config, argparse.Namespace], Coroutine[object, object, int]]] = {
    command.__name__: command for command in (status, transfers, peers, drain)
}


def transfer_table(records: Sequence[TransferRecord]) -> str:
    """Unfinished transfers first, then the newest."""
    rows = []
    for record in sorted(records, key=lambda record: (record.state.ended, -record.created_at)):
        reading_ms = record.phases_ms.get("reading", 0.0)
        rate = f"{size(record.bytes / reading_ms * 1000)}/s" if record.bytes and reading_ms else "-"
        source = record.source.engine_id if record.source else "-"
        why = f"{record.error.code}: {record.error.message}" if record.error else ""
        began = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created_at))
        rows.append((
            record.state.value, record.request_id, source, record.engine_id, record.path or "-", size(record.bytes),
            rate, duration(_total_ms(record)), began, why,
        ))  # fmt: skip
    heads = ("STATE", "REQUEST", "FROM", "TO", "PATH", "BYTES", "RATE", "TOTAL", "BEGAN", "ERROR")
    return table(heads, rows, "no transfers")


def _total_ms(record: TransferRecord) -> float:
    """Of an unfinished transfer the time until now, as phases are counted at their end."""
    if record.state.ended:
        return record.phases_ms.get("total", 0.0)
    return max(0.0, (time.time() - record.created_at) * 1000)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], none: str) -> str:
    """Columns two blanks apart; in a pipe no cell is cut or broken. Control characters are shown as `?`."""
    if not rows:
        return none
    from rich.console import Console  # 50 ms, which the probe of a pod can do without
    from rich.table import Table
    from rich.text import Text

    grid = Table(*heads, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else UNBROKEN)
    with console.capture() as shown:
        console.print(grid)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def group_summary(group: dict[str, object]) -> str:
    if group.get("kind") == "state":
        return f"{group.get('name')} (state, {group.get('num_blocks')})"
    return f"{group.get('name')} ({group.get('num_blocks')} x {group.get('block_size')} tokens)"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes in binary units, three digits or so: `1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while nbytes >= 1024 and unit < len(units) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.1f} {units[unit]}" if unit and nbytes < 100 else f"{nbytes:.0f} {units[unit]}"


def duration(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.1f} ms"
    if ms < 120_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms / 60_000:.0f} min" if ms < 7_200_000 else f"{ms / 3_600_000:.1f} h"


def _json(answer: object) -> None:
    print(json.dumps(TypeAdapter(Any).dump_python(answer, mode="json"), indent=2), flush=True)
