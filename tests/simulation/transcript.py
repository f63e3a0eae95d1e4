"""Transcripts: what an engine and readers say to a source and hear of it, line by line, whatever the source is. Those
in transcripts/ are played by the machines (test_transcripts.py) and by a daemon
(integration/test_source_by_transcripts.py).

A line that says what somebody hears waits for it. So time passes where nothing else can happen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

FOLDER = Path(__file__).parent / "transcripts"
TRANSCRIPTS = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.txt"))}


class Source(Protocol):
    """What a transcript is played against. What is heard is returned in the transcript's words."""

    async def publishes(self, name: str, lease: int, tokens: int, *, more: bool, readers: int) -> None: ...
    async def revokes(self, name: str) -> None: ...
    async def engine_hears(self, name: str, lease: int) -> str: ...
    async def opens(self, who: str, reading: int, name: str, lease: int) -> None: ...
    async def hears(self, who: str, reading: int) -> str: ...
    async def is_told(self, who: str, name: str) -> str: ...
    async def closes(self, who: str, reading: int, name: str, lease: int, *, complete: bool) -> None: ...
    async def packs(self, who: str, reading: int) -> None: ...
    async def has_read(self, who: str, reading: int) -> None: ...
    async def parts(self, who: str) -> None: ...


def update(lease: int, tokens: int, *, more: bool) -> str:
    return f"lease {lease}, {tokens} tokens{', more to come' if more else ''}"


LINES = {
    "publishes": r"engine publishes lease (?P<lease>\d+) of (?P<name>\w+): (?P<tokens>\d+) tokens"
    r"(?P<more>, more to come)?(?:, for (?P<readers>\d+) readers)?",
    "revokes": r"engine revokes (?P<name>\w+)",
    "engine_hears": r"engine hears: lease (?P<lease>\d+) of (?P<name>\w+) is (?P<heard>\w+)",
    "opens": r"(?P<who>[A-Z]) opens (?P<name>\w+) as reading (?P<reading>\d+)(?:, lease (?P<lease>\d+))?",
    "hears": r"(?P<who>[A-Z]) hears of reading (?P<reading>\d+): (?P<heard>.+)",
    "is_told": r"(?P<who>[A-Z]) is told of (?P<name>\w+): (?P<heard>.+)",
    "closes": r"(?P<who>[A-Z]) closes (?:reading (?P<reading>\d+)|lease (?P<lease>\d+) of (?P<name>\w+))"
    r"(?P<unread>, unread)?",
    "packs": r"(?P<who>[A-Z]) wants all of reading (?P<reading>\d+) packed",
    "has_read": r"(?P<who>[A-Z]) has read all of reading (?P<reading>\d+), late",
    "parts": r"(?P<who>[A-Z]) parts",
}


async def play(transcript: str, source: Source) -> None:
    """Raises AssertionError, with the line, where something else is heard."""
    for line in filter(None, (each.partition("#")[0].strip() for each in transcript.splitlines())):
        found = {verb: match for verb, form in LINES.items() if (match := re.fullmatch(form, line)) is not None}
        ((verb, match),) = found.items() or [("nothing", None)]
        assert match is not None, f"no line of a transcript: {line}"
        heard = await _step(verb, match.groupdict(), source)
        assert heard == match.groupdict().get("heard"), f"{line}\nheard: {heard}"


async def _step(verb: str, said: Mapping[str, str | None], source: Source) -> str | None:
    who, name = said.get("who") or "", said.get("name") or ""
    reading, lease = int(said.get("reading") or 0), int(said.get("lease") or 0)
    match verb:
        case "publishes":
            tokens, readers = int(said["tokens"] or 0), int(said["readers"] or 1)
            await source.publishes(name, lease, tokens, more=said["more"] is not None, readers=readers)
        case "revokes":
            await source.revokes(name)
        case "engine_hears":
            return await source.engine_hears(name, lease)
        case "opens":
            await source.opens(who, reading, name, lease)
        case "hears":
            return await source.hears(who, reading)
        case "is_told":
            return await source.is_told(who, name)
        case "closes":
            await source.closes(who, reading, name, lease, complete=said["unread"] is None)
        case "packs":
            await source.packs(who, reading)
        case "has_read":
            await source.has_read(who, reading)
        case "parts":
            await source.parts(who)
    return None
