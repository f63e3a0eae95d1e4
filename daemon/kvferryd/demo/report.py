"""The demo's output: progress while it works, a table of the transfers, one plain line on the tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.schemas import TransferRecord, TransferState
from kvferryd.demo.clients import Completed

T = TypeVar("T")
PATIENCE_S = 2.0
LEGEND = """\
Transfers, as decode's rank 0 daemon reports them, all ranks together.
In tokens: the prompt, what of it decode's prefix cache held, what was
moved. Each run is a NIXL descriptor."""


class Narrator:
    """Prints lines with the seconds since the demo began, and says what is being waited for when it takes longer."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{self.elapsed_s:5.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    async def during(self, work: Awaitable[T], what: Callable[[], str]) -> T:
        """The result of `work`; `what` is said every PATIENCE_S until it is there."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=PATIENCE_S)
                if not task.done():
                    self.say(f"[dim]... {what()}[/dim]")
            return task.result()
        finally:
            task.cancel()


def transfer_table(completed: Sequence[Completed], records: Sequence[TransferRecord]) -> Table:
    """A row per request, in the order in which they were sent."""
    by_request = {record.request_id: record for record in records}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("request", "prompt", "held", "moved", "bytes", "runs", "path", "ms", "state"):
        words = name in ("request", "path", "state")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    for answer in completed:
        record = by_request.get(answer.transfer)
        row = [answer.prompt.request_id, str(len(answer.prompt.tokens)), str(answer.held)]
        if record is None:
            table.add_row(*row, "", "", "", "", "", "[red]none[/red]")
            continue
        moved = record.tokens[1] - record.tokens[0] if record.tokens else 0
        state = record.state.value if record.state is TransferState.DONE else f"[red]{record.state.value}[/red]"
        total_ms = record.phases_ms.get("total")
        table.add_row(
            *row, str(moved), f"{record.bytes:,}", f"{record.descriptors:,}", record.path,
            "" if total_ms is None else f"{total_ms:.1f}", state,
        )  # fmt: skip
    return table


def verdict(completed: Sequence[Completed], alone: Sequence[Completed], records: Sequence[TransferRecord]) -> list[str]:
    """The differences and failures; empty when every token is equal and every transfer done."""
    faults = []
    by_request = {record.request_id: record for record in records}
    for answer, expected in zip(completed, alone, strict=True):
        name = answer.prompt.request_id
        if len(answer.tokens) != answer.prompt.max_tokens:
            faults.append(f"{name}: {len(answer.tokens)} tokens came, {answer.prompt.max_tokens} were asked for")
        if answer.tokens != expected.tokens:
            pairs = zip(answer.tokens, expected.tokens, strict=False)
            at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(answer.tokens))
            faults.append(
                f"{name}: differs from the single engine from token {at} on: "
                f"{list(answer.tokens[at : at + 4])} instead of {list(expected.tokens[at : at + 4])}"
            )
        record = by_request.get(answer.transfer)
        if record is None:
            faults.append(f"{name}: the decode daemon knows of no transfer")
        elif record.state is not TransferState.DONE:
            reason = f": {record.error.code}: {record.error.message}" if record.error else ""
            faults.append(f"{name}: its transfer is {record.state.value}{reason}")
    return faults


def all_equal(completed: Sequence[Completed]) -> str:
    tokens = sum(len(answer.tokens) for answer in completed)
    return f"all {tokens} tokens of {len(completed)} prompts equal those of a single engine"
