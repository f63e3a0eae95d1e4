"""The transfers that a daemon still knows, for those that look for them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvferry.errors import NotFound
from kvferryd.transfers.transfer import Transfer


class Book:
    def __init__(self, name: str) -> None:
        """name: of this process, in cursors."""
        self._by_id: OrderedDict[str, Transfer] = OrderedDict()
        self._by_part: dict[int, Transfer] = {}
        self._by_request: dict[str, list[Transfer]] = {}
        self._name, self._overs = name, 0
        """How many transfers were over so far."""

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_id.values()))

    def __getitem__(self, part: int) -> Transfer:
        return self._by_part[part]

    def find(self, transfer_id: str) -> Transfer | None:
        return self._by_id.get(transfer_id)

    def get(self, transfer_id: str) -> Transfer:
        """Raises KvferryError (`unknown_transfer`)."""
        if (transfer := self.find(transfer_id)) is None:
            raise _unknown(transfer_id)
        return transfer

    def of_engine(self, engine_id: str, transfer_id: str) -> Transfer:
        """A transfer that this engine reads. Raises KvferryError (`unknown_transfer`)."""
        if (transfer := self.get(transfer_id)).own.engine_id != engine_id:
            raise _unknown(transfer_id)
        return transfer

    def of_request(self, request_id: str) -> list[Transfer]:
        """The oldest first."""
        return list(self._by_request.get(request_id, ()))

    def listed(self, since: str, limit: int, wanted: Callable[[Transfer], bool]) -> tuple[list[Transfer], str, bool]:
        """(the newest `limit` that are wanted and may have changed since, a cursor for the next call, whether all count
        as changed); the oldest first. Unfinished ones always may have."""
        name, _, number = since.partition("-")
        whole = name != self._name
        seen = 0 if whole else int(number)
        found = (each for each in reversed(self._by_id.values()) if each.over_number == 0 or each.over_number > seen)
        newest = list(itertools.islice(filter(wanted, found), limit))
        return newest[::-1], f"{self._name}-{self._overs}", whole

    def add(self, part: int, transfer: Transfer) -> None:
        self._by_id[transfer.transfer_id] = self._by_part[part] = transfer
        self._by_request.setdefault(transfer.request_id, []).append(transfer)

    def over(self, transfer: Transfer) -> None:
        self._overs += 1
        transfer.over_number = self._overs
        transfer.course.over()
        transfer.wake()

    def forget(self, part: int) -> None:
        transfer = self._by_part.pop(part)
        del self._by_id[transfer.transfer_id]
        of_request = self._by_request[transfer.request_id]
        of_request.remove(transfer)
        if not of_request:
            del self._by_request[transfer.request_id]


def _unknown(transfer_id: str) -> NotFound:
    why = f"transfer {transfer_id} is not known"
    remedy = "the daemon keeps the last ones only (history); look it up by request_id at the right daemon"
    return NotFound("unknown_transfer", why, field="transfer_id", value=transfer_id, remedy=remedy)
