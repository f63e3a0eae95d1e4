"""The daemon's history, which outlives it: figures by the minute for a day, the last records, and each start,
death and drain. The keeper's file, or that of the state folder, hands it to the next daemon.

`store` has the parts of the file. A record is written when its transfer begins and when it is over, so a transfer that
a file has under way when a daemon opens it has died with the daemon before. Figures are gathered for a moment, until
`flush`: a daemon that is killed loses those of that moment, and no record.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from kvferry.errors import KvferryError, Malformed, Unavailable
from kvferry.file import File
from kvferry.schemas import (
    ErrorBody,
    FailedRequest,
    HistoryFigures,
    HistoryMark,
    HistoryPeer,
    HistoryPoint,
    MarkKind,
    RankTransfer,
    TransferRecord,
    TransferState,
)
from kvferryd.observe import logs
from kvferryd.observe.failures import Failures
from kvferryd.observe.store import Figures, Rows, Slots, add, empty, merge, quantiles

log = logs.get(__name__)
MAGIC = b"kvferry history 2\n"
"""The layout: another one is begun anew."""
DAY_S, MINUTE_S, SECONDS_S, SECONDS = 86_400, 60, 5, 64
PEERS, NAMES, MARKS, RECORDS = 64, 63, 256, 1000
RECORD = 2048
"""Bytes of a record. A longer one is compressed; of one that is longer even so the other ranks are left out."""
WHY = 200
"""Bytes of the text of a mark."""
ALL, OTHERS, LINES = 0, PEERS + 1, PEERS + 2
"""Lines of the minutes: all peers, the sum of those that have no line, and how many lines there are."""
OTHER = "other"
"""Peers or codes that have no place of their own."""


class Earlier(NamedTuple):
    """A record of an earlier daemon."""

    transfer_id: str
    request_id: str
    state: TransferState
    body: bytes
    """As JSON."""


class History:
    """Owns the file. The file is open in one daemon at a time. Only `told` may be called on another thread."""

    def __init__(self, file: File, because: str = "") -> None:
        """because: what became of the daemon before, as the keeper says. Raises OSError."""
        self._file = file
        self._peers = Slots(file, 4096, PEERS, 256)
        self._codes = Slots(file, self._peers.end, NAMES, 64)
        self._marks = Slots(file, self._codes.end, MARKS, 512)
        self._records = Slots(file, self._marks.end, RECORDS, RECORD)
        self._seconds = Rows(file, self._records.end, SECONDS_S, SECONDS, 1)
        self._minutes = Rows(file, self._seconds.end, MINUTE_S, DAY_S // MINUTE_S, LINES)
        self.nbytes = self._minutes.end
        self.began_at = 0
        """Nothing is known of the time before, in seconds since 1970."""
        self._faulty = False
        self._lines: dict[str, int] = {}
        """Keyed by peer; from 1."""
        self._seen: dict[int, int] = {}
        """The last minute of each line."""
        self._numbers: dict[str, int] = {}
        """Keyed by code; from 1."""
        self._at: dict[str, int] = {}
        """Numbers of records under way, by transfer."""
        self._gathered: dict[str, list[int]] = {}
        """Rows of figures that are still to be written, by peer."""
        self._period = 0
        """The five seconds to which they belong."""
        self._last = self._last_mark = 0
        self.failures = Failures()
        self.earlier: tuple[Earlier, ...] = ()
        """Records of daemons before this one, the oldest first."""
        self._open(because)

    # ---- what happens ----

    def began(self, record: Mapping[str, object]) -> None:
        """record: fields of a TransferRecord that say which it is. Again, once more is known of it."""
        name = str(record["transfer_id"])
        if name not in self._at:
            self._last += 1
            self._at[name] = self._last
        self._put(self._at[name], json.dumps(record).encode())

    def over(self, transfer_id: str, record: bytes) -> None:
        """record: as JSON."""
        number = self._at.pop(transfer_id, 0)
        if number <= max(0, self._last - RECORDS):  # it never had a place, or another has it now
            self._last += 1
            number = self._last
        self._put(number, record)

    def ended(self, share: RankTransfer, source: str) -> None:
        """This rank's share of a transfer has ended; `source`: the engine that it read from."""
        done, failed = share.state is TransferState.DONE, share.state is TransferState.FAILED
        self._count(
            source,
            done=done,
            failed=failed,
            aborted=not done and not failed,
            read_bytes=share.bytes if done else 0,
            code=share.error.code if share.error and failed else "",
            took_ms=share.phases_ms.get("total", 0.0) - share.phases_ms.get("waiting", 0.0) if done else None,
        )

    def served(self, reader: str, nbytes: int) -> None:
        self._count(reader, served_bytes=nbytes)

    def mark(self, kind: MarkKind, why: str = "") -> None:
        self._last_mark += 1
        short = "".join(filter(str.isprintable, why)).encode()[:WHY].decode(errors="ignore")
        mark = HistoryMark(at=round(time.time(), 3), kind=kind, why=short)
        self._try(self._marks, (self._last_mark - 1) % MARKS, self._last_mark, mark.model_dump_json().encode())

    def close(self) -> None:
        """The daemon stops by itself. Idempotent."""
        if self._file.fileno() >= 0:
            self.flush()
            self.mark(MarkKind.STOP)
            self._file.close()

    # ---- what has happened ----

    def told(
        self, span_s: float, step_s: int, since: float, *, peers: bool = False
    ) -> tuple[list[HistoryPoint], list[HistoryMark], list[HistoryPeer]]:
        """(points, each of `step_s`, in which anything happened; marks; figures of each peer, if asked for) of the last
        `span_s`, and no point that has ended before `since`. Any thread, after a `flush`; raises OSError."""
        now = time.time()
        first = max(since // step_s * step_s, now - span_s)
        rows = (self._seconds if step_s < MINUTE_S else self._minutes).since(ALL, first, now)
        period = SECONDS_S if step_s < MINUTE_S else MINUTE_S
        points = [
            HistoryPoint(at=at, **figures.model_dump())
            for at, figures in self._figures(rows, rows["number"].astype(np.int64) * period // step_s * step_s)
        ]
        marks = [
            mark for _, mark in sorted(self._marked(), key=lambda each: each[0]) if mark.at >= max(since, now - span_s)
        ]
        of_peers = []
        for name, line in [*self._lines.items(), (OTHER, OTHERS)] if peers else []:
            rows = self._minutes.since(line, first, now)
            for _, figures in self._figures(rows, np.zeros(len(rows), np.int64)):
                of_peers.append(HistoryPeer(engine_id=name, **figures.model_dump()))
        return points, marks, of_peers

    def _figures(self, rows: Figures, at: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[
        tuple[int, HistoryFigures]
    ]:  # fmt: skip
        """The sums of rows of one moment, with that."""
        if not len(rows):
            return
        moments, begins = np.unique(at, return_index=True)
        sums = {
            name: np.add.reduceat(rows[name].astype(np.uint64), begins)
            for name in ("done", "failed", "aborted", "read_bytes", "served_bytes", "took")
        }
        p50, p99 = (quantiles(sums["took"], share) for share in (0.5, 0.99))
        codes = {number: code for code, number in self._numbers.items()}
        ends = [*begins[1:], len(rows)]
        for index, (moment, begin, end) in enumerate(zip(moments, begins, ends, strict=True)):
            failed, failures = int(sums["failed"][index]), dict[str, int]()
            for number, times in rows["codes"][begin:end].reshape(-1) if failed else ():
                if number and times:
                    name = codes.get(int(number), OTHER)
                    failures[name] = failures.get(name, 0) + int(times)
            if (rest := failed - sum(failures.values())) > 0:
                failures[OTHER] = failures.get(OTHER, 0) + rest
            yield (
                int(moment),
                HistoryFigures(
                    done=int(sums["done"][index]), failed=failed, aborted=int(sums["aborted"][index]),
                    read_bytes=int(sums["read_bytes"][index]), served_bytes=int(sums["served_bytes"][index]),
                    failures=failures, p50_ms=p50[index], p99_ms=p99[index],
                ),
            )  # fmt: skip

    # ---- the file ----

    def _open(self, because: str) -> None:
        head = MAGIC + self.nbytes.to_bytes(8, "little")
        held = os.pread(self._file.fileno(), len(head) + 8, 0)
        if not held.startswith(head) or os.fstat(self._file.fileno()).st_size != self.nbytes:
            held = head + int(time.time()).to_bytes(8, "little")
            os.ftruncate(self._file.fileno(), 0)
            os.ftruncate(self._file.fileno(), self.nbytes)
            os.pwrite(self._file.fileno(), held, 0)
        self.began_at = int.from_bytes(held[len(head) :], "little")
        for index, number, data in self._peers:
            self._lines[data.decode(errors="replace")], self._seen[index + 1] = index + 1, number
        self._numbers = {data.decode(errors="replace"): index + 1 for index, _, data in self._codes}
        marked = sorted(self._marked(), key=lambda each: each[0])
        self._last_mark, last = (marked[-1][0], marked[-1][1].kind) if marked else (0, MarkKind.STOP)
        if last is not MarkKind.STOP:
            self.mark(MarkKind.DEATH, because)
        found = sorted((number, record) for _, number, data in self._records for record in _unpacked(data))
        self._last = found[-1][0] if found else 0
        self.earlier = tuple(self._earlier(found, because))
        self.flush()
        self.mark(MarkKind.UPGRADE if because and last is MarkKind.STOP else MarkKind.START, because)

    def _earlier(self, found: Iterable[tuple[int, bytes]], because: str) -> Iterator[Earlier]:
        for number, body in found:
            try:
                record = TransferRecord.model_validate_json(body)
            except ValidationError:  # another version's, or damaged
                continue
            if not record.state.ended:
                record = _died(record, because)
                body = record.model_dump_json().encode()
                self._put(number, body)
                self.ended(record.ranks[0], record.source.engine_id if record.source else "")
            if record.state is TransferState.FAILED and record.error is not None:
                self.failures.note(FailedRequest.of(record, record.error))
            yield Earlier(record.transfer_id, record.request_id, record.state, body)

    def _marked(self) -> Iterator[tuple[int, HistoryMark]]:
        for _, number, data in self._marks:
            try:
                yield number, HistoryMark.model_validate_json(data)
            except ValidationError:
                continue

    def flush(self) -> None:
        """Write the figures that were gathered."""
        gathered, self._gathered = self._gathered, {}
        if not gathered:
            return
        now, of_all = self._period * SECONDS_S, empty()
        try:
            for peer, row in gathered.items():
                merge(of_all, row)
                if peer:
                    self._minutes.add(self._line(peer, now // MINUTE_S), now, row)
            for rows in (self._seconds, self._minutes):
                rows.add(ALL, now, of_all)
        except OSError as error:
            self._fault(error)

    def _count(self, peer: str, *, code: str = "", took_ms: float | None = None, **figures: int) -> None:
        period = int(time.time()) // SECONDS_S
        if period != self._period:
            self.flush()
            self._period = period
        row = self._gathered.get(peer)
        if row is None:
            row = self._gathered[peer] = empty()
        add(row, figures, self._number(code) if code else 0, took_ms)

    def _line(self, peer: str, minute: int) -> int:
        """The peer's line. The 65th peer of a day has that of the others."""
        name = peer.encode()[: self._peers.room].decode(errors="ignore")
        line = self._lines.get(name)
        if line is None:
            free = [line for line in range(1, PEERS + 1) if self._seen.get(line, 0) <= minute - DAY_S // MINUTE_S]
            if not free:
                return OTHERS
            line = free[0]
            self._lines = {each: other for each, other in self._lines.items() if other != line} | {name: line}
        if self._seen.get(line) != minute:
            self._seen[line] = minute
            self._try(self._peers, line - 1, minute, name.encode())
        return line

    def _number(self, code: str) -> int:
        """0 where there is no place left."""
        if code not in self._numbers:
            free = sorted({*range(1, NAMES + 1)} - {*self._numbers.values()})
            if not free or len(code.encode()) > self._codes.room:
                return 0
            self._numbers = {**self._numbers, code: free[0]}
            self._try(self._codes, free[0] - 1, free[0], code.encode())
        return self._numbers[code]

    def _put(self, number: int, record: bytes) -> None:
        data = record if len(record) <= self._records.room else _packed(record, self._records.room)
        self._try(self._records, (number - 1) % RECORDS, number, data)

    def _try(self, slots: Slots, index: int, number: int, data: bytes) -> None:
        try:
            slots.put(index, number, data)
        except OSError as error:
            self._fault(error)

    def _fault(self, error: OSError) -> None:
        """Said once: transfers go on without."""
        if not self._faulty:
            self._faulty = True
            log.warning("the history cannot be written", error=str(error))


def opened(folder: Path | None = None, given: File | None = None, because: str = "") -> History:
    """The history in the state folder, in the keeper's file, or in memory of our own. given: the keeper's.

    Raises KvferryError (`bad_config`).
    """
    if folder is None:
        return History(given or File(os.memfd_create("kvferry-history", os.MFD_CLOEXEC)), because)
    path = folder / "history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _bad_state(folder, f"{path} is no file", "name a folder for this daemon alone")
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return History(file, because)
    except BlockingIOError:
        raise _bad_state(folder, f"another daemon has {path} open", "name a folder for each daemon") from None
    except OSError as error:
        why = f"the history at {path} cannot be had: {error.strerror}"
        raise _bad_state(folder, why, "name a folder that this user may write to") from None


def _bad_state(folder: Path, why: str, remedy: str) -> KvferryError:
    return Malformed("bad_config", why, field="state", value=folder, remedy=remedy)


def _died(record: TransferRecord, because: str) -> TransferRecord:
    """The record of a transfer that had no end in the file."""
    why = f"it died with the daemon{f' ({because})' if because else ''}"
    remedy = "send the order again: the daemon that serves now knows nothing of it"
    error = ErrorBody.of(Unavailable("daemon_died", why, remedy=remedy))
    share = RankTransfer(rank=record.slowest_rank, state=TransferState.FAILED, error=error)
    changed = {"state": TransferState.FAILED, "error": error, "ranks": [share], "ended_at": time.time()}
    return record.model_copy(update=changed)


def _packed(record: bytes, room: int) -> bytes:
    packed = zlib.compress(record, 1)
    if len(packed) > room:
        packed = zlib.compress(json.dumps(json.loads(record) | {"ranks": []}).encode(), 1)
    return packed if len(packed) <= room else b"{}"


def _unpacked(data: bytes) -> Iterator[bytes]:
    """Nothing where it is damaged."""
    if data[:1] == b"{":
        yield data
        return
    unpacking = zlib.decompressobj()
    try:
        record = unpacking.decompress(data, 1 << 20)
    except zlib.error:
        return
    if unpacking.eof:
        yield record
