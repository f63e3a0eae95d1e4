"""What has ended, for an engine that asks between its steps."""

from __future__ import annotations

import threading


class Ended:
    """Ids of requests, told by any thread and taken by another, each once."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._sent: set[str] = set()
        self._arrived: set[str] = set()
        self._failed: set[str] = set()

    def sent(self, request_id: str) -> None:
        """Nobody reads its blocks any more."""
        with self._news:
            self._sent.add(request_id)
            self._news.notify()

    def arrived(self, request_id: str, *, whole: bool) -> None:
        """Nothing is written to its blocks any more. whole: its KV is there."""
        with self._news:
            self._arrived.add(request_id)
            if not whole:
                self._failed.add(request_id)
            self._news.notify()

    def take(self, wait_s: float = 0.0) -> tuple[set[str], set[str], set[str]]:
        """(sent, arrived, those of the arrived that are not whole) since the last call.

        wait_s: where nothing has ended yet, wait so long for the first.
        """
        with self._news:
            self._news.wait_for(lambda: self._sent or self._arrived, wait_s)
            taken = self._sent, self._arrived, self._failed
            self._sent, self._arrived, self._failed = set(), set(), set()
        return taken
