"""Readers that wait for a publish, so many at most, and from one place at most half of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvferry.errors import Full, KvferryError
from kvferry.protocol.events import Ask
from kvferry.protocol.values import ReaderId, Reading, Sizes


class Waits:
    def __init__(self, limit: int) -> None:
        """limit: requests that may be waited for."""
        self._limit = limit
        self._requests: dict[str, dict[Reading, tuple[Ask, ReaderId]]] = {}
        self._request_of: dict[Reading, str] = {}
        self._at: Counter[str] = Counter()
        """Counted by the place of the caller: no place takes all the waits."""

    def refusal(self, request_id: str, who: ReaderId) -> KvferryError | None:
        if request_id not in self._requests and len(self._requests) >= self._limit:
            return Full("full", f"readers wait for {self._limit} publishes already", value=self._limit)
        if who.host and self._at[who.host] >= self._limit // 2:
            why = f"{self._limit // 2} readers from {who.host} wait for publishes already"
            return Full("full", why, field="address", value=who.host, remedy="order a request when it is prefilled")
        return None

    def add(self, asked: Ask, who: ReaderId) -> None:
        self._requests.setdefault(asked.request_id, {})[asked.reading] = asked, who
        self._request_of[asked.reading] = asked.request_id
        self._at[who.host] += 1

    def pop(self, reading: Reading) -> tuple[Ask, ReaderId] | None:
        request_id = self._request_of.pop(reading, None)
        if request_id is None:
            return None
        asked, who = self._requests[request_id].pop(reading)
        if not self._requests[request_id]:
            del self._requests[request_id]
        self._at[who.host] -= 1
        if not self._at[who.host]:
            del self._at[who.host]
        return asked, who

    def up_to(self, request_id: str, number: int | None = None) -> list[tuple[Ask, ReaderId]]:
        """The readers that wait for a lease of the request up to this number (None: any), to be answered now."""
        waiting = self._requests.get(request_id, {})
        now = [reading for reading, (asked, _) in waiting.items() if number is None or asked.lease <= number]
        return [waited for reading in now if (waited := self.pop(reading)) is not None]

    def others_than(self, request_id: str, who: ReaderId) -> bool:
        """Whether an engine other than that of `who` waits for it."""
        return any(each.engine != who.engine for _, each in self._requests.get(request_id, {}).values())

    def __iter__(self) -> Iterator[tuple[Ask, ReaderId]]:
        return (each for them in self._requests.values() for each in them.values())

    def requests(self) -> list[str]:
        return list(self._requests)

    def check(self) -> None:
        assert self._request_of == {each: name for name, them in self._requests.items() for each in them}
        assert self._at == Counter(who.host for them in self._requests.values() for _, who in them.values())
        assert all(self._requests.values())

    def sizes(self) -> Sizes:
        return {"awaited": len(self._requests), "waiting": len(self._request_of), "waiting at": len(self._at)}
