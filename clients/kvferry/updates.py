"""Updates of the weights that an engine computes with: a call that replaces them, or a session of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvferry.weights import Weights

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """The functions of an engine that begin an update of several parts, and the one that ends it."""

    begins: frozenset[str]
    end: str
    broken_by: frozenset[str] = frozenset()
    """Functions whose failure ends the session in the engine, too."""

    def goes_on(self, how: str, success: bool, *, is_open: bool) -> bool:
        """Whether it is open once this function has been called."""
        if how in self.begins:
            return success or is_open
        return is_open and not (success and how == self.end) and (success or how not in self.broken_by)


SGLANG = Session(frozenset({"begin_weight_update"}), "end_weight_update")
VLLM = Session(
    frozenset({"start_weight_update", "start_draft_weight_update"}),
    "finish_weight_update",
    broken_by=frozenset({"update_weights"}),
)


class Updates:
    """The updates of one rank, called by the thread that computes.

    A caller may tell a version with any part of an update. It names the weights when all of them are there: before, and
    where a part has failed, they have a name that no other engine knows.
    """

    def __init__(self, weights: Weights, session: Session) -> None:
        self._weights, self._session = weights, session
        self._version: str | None = None
        self._in_session = self._in_part = self._told = self._whole = False

    def part(self, how: str, replace: Callable[[], T], reloaded: Callable[[], None] | None = None) -> T:
        """Let the engine's function of this name do a part of an update, which is its result. It fails by an exception,
        or by a result that is no `success`. reloaded: names weights that the function reads from a checkpoint."""
        if not self._in_session:
            self._version, self._whole = None, True
        whole, self._whole = self._whole, False
        self._in_part, self._told, success = True, False, False
        try:
            with self._weights.replacing():
                try:
                    result = replace()
                    success = bool(getattr(result, "success", True))
                finally:
                    self._in_session = self._session.goes_on(how, success, is_open=self._in_session)
        finally:
            self._in_part = False
        # SGLang tells the version when the weights are there; then it may fail to flush its cache.
        self._whole = whole and (success or self._told)
        if self._whole and not self._in_session:
            if self._version is not None:
                self._weights.rename(self._version)
            elif reloaded is not None:
                reloaded()
        return result

    def tell(self, version: str) -> None:
        """The caller's name for the weights that the update under way will leave; without one, for those in use."""
        self._version, self._told = version, True
        if not (self._in_part or self._in_session):
            self._weights.rename(version)

    def replaced(self, name: str) -> None:
        """The caller has replaced weights itself, and calls them this; inside a session, those that it will leave."""
        if self._in_session:
            with self._weights.replacing():
                self.tell(name)
        else:
            self._weights.replaced(name)
