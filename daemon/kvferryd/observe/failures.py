"""The failures of a daemon: how many in the last five minutes, which is the one rule by which it counts as degraded;
and the last of each engine that it reads."""

from __future__ import annotations

import time

from kvferry.schemas import FailedLately, FailedRequest

LATELY_S, PERIOD_S, DAY_S = 300, 5, 86_400
"""How long a failure counts, and to which second; how long it is told of an engine."""
ENGINES = 64


class Failures:
    """Times are those of the clock of the wall, as in records."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """How many failed, by five seconds since 1970."""
        self._last: FailedRequest | None = None
        self._of_engines: dict[str, FailedRequest] = {}
        """The last one that read from each engine."""

    def note(self, failed: FailedRequest) -> None:
        period = int(failed.at) // PERIOD_S
        self._counts = {each: count for each, count in self._counts.items() if _lately(each)}
        self._counts[period] = self._counts.get(period, 0) + 1
        if self._last is None or not _lately(int(self._last.at) // PERIOD_S) or self._last.at <= failed.at:
            self._last = failed
        held = self._of_engines.get(failed.engine_id)
        if failed.transfer_id and failed.engine_id and (held is None or held.at <= failed.at):
            of_others = (each for each in self.of_engines() if each.engine_id != failed.engine_id)
            self._of_engines = {each.engine_id: each for each in [failed, *of_others][:ENGINES]}

    def of_engines(self) -> list[FailedRequest]:
        """The last one that read from each engine in 24 hours, the newest first."""
        since = time.time() - DAY_S
        told = (each for each in self._of_engines.values() if each.at > since)
        return sorted(told, key=lambda each: each.at, reverse=True)

    def lately(self) -> FailedLately | None:
        """None where nothing has failed."""
        failed = sum(count for period, count in self._counts.items() if _lately(period))
        return FailedLately(failed=failed, last=self._last) if failed and self._last is not None else None


def _lately(period: int) -> bool:
    now = int(time.time()) // PERIOD_S
    return now - LATELY_S // PERIOD_S < period <= now
