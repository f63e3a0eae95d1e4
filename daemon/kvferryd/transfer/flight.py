"""What may still write to a transfer's blocks, whichever way it goes."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Flight(Protocol):
    """`quiet`: nothing is written any more. `nbytes`: of the blocks it writes. `seconds` counts for `phase`."""

    @property
    def quiet(self) -> asyncio.Future[None]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def phase(self) -> str: ...
    def abandon(self) -> None: ...
