"""The addresses that the settings name: met before anybody waits for them, and again when they are known no more."""

from __future__ import annotations

from kvferry.errors import KvferryError
from kvferry.protocol.frozen import frozen
from kvferry.protocol.values import Sizes

AT_ONCE = 32
"""Addresses that are asked at a time. Addresses that have failed before take half of the places: their silence keeps no
other from being met."""
AGAIN_S = 60.0
"""The longest pause before an address that cannot be met is tried again; the first is a second."""


@frozen
class _Failed:
    times: int
    """In a row."""
    again_at: float
    code: str


class Wanted:
    def __init__(self) -> None:
        self._addresses: dict[str, None] = {}
        self._met: dict[str, int] = {}
        """The peer that was met at each."""
        self._asked: dict[str, bool] = {}
        """Addresses that are being met; whether each has failed before."""
        self._failed: dict[str, _Failed] = {}

    def want(self, addresses: tuple[str, ...]) -> None:
        self._addresses = dict.fromkeys(addresses)
        self._met = {address: number for address, number in self._met.items() if address in self._addresses}
        self._failed = {address: failed for address, failed in self._failed.items() if address in self._addresses}

    @property
    def met(self) -> set[int]:
        return set(self._met.values())

    def drop(self, number: int) -> None:
        """This peer is not known any more, or is lost."""
        self._met = {address: each for address, each in self._met.items() if each != number}

    def next(self, now: float) -> list[str]:
        """The addresses to ask now: `found` or `failed` follows for each."""
        again, asked = sum(self._asked.values()), []
        for address in self._addresses:
            if len(self._asked) >= AT_ONCE:
                break
            if address in self._met or address in self._asked:
                continue
            before = self._failed.get(address)
            if before is not None and (before.again_at > now or again >= AT_ONCE // 2):
                continue
            again += before is not None
            self._asked[address] = before is not None
            asked.append(address)
        return asked

    def found(self, address: str, number: int) -> None:
        del self._asked[address]
        self._failed.pop(address, None)
        if address in self._addresses:
            self._met[address] = number

    def failed(self, address: str, why: KvferryError, now: float) -> bool:
        """Whether it is for another reason than before."""
        del self._asked[address]
        if address not in self._addresses:
            return False
        before = self._failed.get(address, _Failed(0, 0.0, ""))
        again_at = now + min(AGAIN_S, 2.0 ** min(before.times, 8))
        self._failed[address] = _Failed(before.times + 1, again_at, why.code)
        return why.code != before.code

    def shut(self) -> None:
        self.want(())
        self._asked.clear()

    def check(self) -> None:
        assert len(self._asked) <= AT_ONCE and sum(self._asked.values()) <= AT_ONCE // 2
        assert self._met.keys() <= self._addresses.keys() and self._failed.keys() <= self._addresses.keys()
        assert not self._met.keys() & self._asked.keys(), "it is met, and asked again"
        assert not self._met.keys() & self._failed.keys()

    def sizes(self) -> Sizes:
        met, asked, failed = len(self._met), len(self._asked), len(self._failed)
        return {"wanted": len(self._addresses), "met": met, "asked": asked, "failed": failed}
