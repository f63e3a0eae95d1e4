"""Collections that are bounded, and timers."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _one(_: object) -> int:
    return 1


class Latest(Generic[K, V]):
    """The values that were put last, as many as there is room for; the earliest go first."""

    def __init__(self, room: int, size: Callable[[V], int] = _one) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._room, self._size, self._used = room, size, 0

    def __len__(self) -> int:
        """The sum of its values' sizes."""
        return self._used

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __reversed__(self) -> Iterator[V]:
        """The last that was put comes first."""
        return reversed(self._values.values())

    def items(self) -> list[tuple[K, V]]:
        """The last that was put comes last."""
        return list(self._values.items())

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        self.pop(key)
        self._values[key] = value
        self._used += self._size(value)
        while self._used > self._room:
            self._used -= self._size(self._values.popitem(last=False)[1])

    def pop(self, key: K) -> V | None:
        value = self._values.pop(key, None)
        if value is not None:
            self._used -= self._size(value)
        return value


class Alarms(Generic[K]):
    """When each key is due. A key is set anew as often as one likes: the heap is looked at when time has passed."""

    SLACK = 64

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._set = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    @property
    def entries(self) -> int:
        """How many the heap has, those that do not count any more included."""
        return len(self._heap)

    def set(self, key: K, at: float) -> None:
        later = key in self._at and at >= self._at[key]
        self._at[key] = at
        if not later:  # else its entry is found too early, and put back
            self._push(key, at)
        if len(self._heap) > 2 * len(self._at) + self.SLACK:
            self._heap.clear()
            for each, due in self._at.items():
                self._push(each, due)

    def drop(self, key: K) -> None:
        self._at.pop(key, None)
        if not self._at:
            self._heap.clear()

    def due(self, now: float) -> list[K]:
        """The keys whose time has come, the earliest first. They are set no longer."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, key = heapq.heappop(self._heap)
            at = self._at.get(key)
            if at is not None and at > now:
                self._push(key, at)
            elif at is not None:
                due.append(key)
                del self._at[key]
        return due

    def next(self) -> float | None:
        """When to look again; perhaps nothing is due by then."""
        while self._heap and self._heap[0][2] not in self._at:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _push(self, key: K, at: float) -> None:
        self._set += 1
        heapq.heappush(self._heap, (at, self._set, key))
