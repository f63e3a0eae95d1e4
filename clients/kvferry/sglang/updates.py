"""Updates of the weights that SGLang computes with: a call that replaces them, or a session of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.weights import Weights

BEGIN, END = "begin_weight_update", "end_weight_update"


class Updates:
    """The updates of one rank, called by the scheduler's thread.

    A caller may tell a version with any part of an update. It names the weights when all of them are there: before, and
    where a part has failed, they have a name that no other engine knows.
    """

    def __init__(self, weights: Weights, reloaded: Callable[[str], None]) -> None:
        """reloaded: told the folder of the checkpoint that the weights are those of by now."""
        self._weights, self._reloaded = weights, reloaded
        self._version: str | None = None
        self._in_session = self._in_part = self._told = self._whole = False

    def part(self, how: str, replace: Callable[[], Any], folder: str = "") -> Any:
        """Let SGLang's function of this name do a part of an update, which is its result. folder: of the checkpoint
        that it reads, if it does."""
        if not self._in_session:
            self._version, self._whole = None, True
        whole, self._whole = self._whole, False
        self._in_part, self._told = True, False
        try:
            with self._weights.replacing():
                result = replace()
        finally:
            self._in_part = False
        # SGLang tells the version when the weights are there; then it may fail to flush its cache.
        self._whole = whole and (result.success or self._told)
        if result.success and how in (BEGIN, END):
            self._in_session = how == BEGIN
        if self._whole and not self._in_session:
            if self._version is not None:
                self._weights.rename(self._version)
            elif folder:
                self._reloaded(folder)
        return result

    def tell(self, version: str) -> None:
        """The caller's name for the weights that the update under way will leave; without one, for those in use."""
        self._version, self._told = version, True
        if not (self._in_part or self._in_session):
            self._weights.rename(version)
