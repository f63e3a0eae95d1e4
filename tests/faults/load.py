"""Two engines that exchange requests without pause while their daemons die: every one ends right or with an error."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fleet import TIMEOUT_S
from ranks import NHD, Blocks, Bytes, Kv, Shape, describe

from kvferry.blocking import BlockingEngineClient
from kvferry.engine import Unsettled
from kvferry.errors import KvferryError
from kvferry.memory import SharedRegion
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService

SHAPE = Shape(axes=NHD, block_size=16, num_blocks=768)
TOKENS = (40, 4000)
"""Tokens of a small request, and of one that takes a while to read: 2.3 MB."""


class Engine:
    """A rank, which lives in this process whatever becomes of its daemon."""

    def __init__(self, name: str, daemon: DaemonService, epoch: str) -> None:
        self.name, self.daemon = name, daemon
        self.said: queue.Queue[str] = queue.Queue()
        self.attached = threading.Event()
        self.attached.set()
        self.client = BlockingEngineClient.connect(
            str(daemon.socket), engine_id=name, epoch=epoch, timeout_s=TIMEOUT_S, say=self._say
        )
        self.memory = self._registered(epoch)

    def _registered(self, epoch: str) -> Bytes:
        """The cache of one rank, in memory of the daemon's."""
        region = self.client.allocate(SHAPE.nbytes(0))
        assert isinstance(region, SharedRegion)
        self.client.register(describe(self.name, epoch, SHAPE, 0, region))
        return region.array()

    def written(self) -> None:
        """`memory` has been written to."""

    def held(self) -> Bytes:
        """The cache as it is now."""
        return self.memory

    def _say(self, what: str) -> None:
        (self.attached.set if "there again" in what else self.attached.clear)()
        self.said.put(what)

    def publish(self, request_id: str, kv: Kv, blocks: Blocks) -> Any:
        SHAPE.write(0, self.memory, kv, blocks, (0, kv.tokens), True)
        self.written()
        return self.client.publish(request_id, blocks.tables(), kv.tokens)

    def receive(self, request_id: str, blocks: Blocks, source: Engine) -> None:
        named = SourceBody(engine_id=source.name, address=source.daemon.peer)
        self.client.receive(request_id, blocks.tables(), source=named, deadline_s=10).result(TIMEOUT_S)

    def quiet(self, error: KvferryError) -> None:
        """Wait until the blocks of a call that failed may be used again."""
        if isinstance(error, Unsettled):
            self.client.call(error.quiesced(), TIMEOUT_S)


@dataclass
class Load:
    """`workers` requests at a time from `source` to `reader`."""

    source: Engine
    reader: Engine
    workers: int = 3
    done: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By code."""
    wrong: list[str] = field(default_factory=list)
    """Faults that must never be: other bytes, a wait without an end, an exception that is none of ours."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self.workers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over = True
            for thread in threads:
                thread.join(2 * TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads), "a request does not end"

    def more(self, count: int = 5) -> float:
        """Wait until so many more have been done; the seconds it took."""
        began = time.monotonic()
        with self._changed:
            wanted = self.done + count
            self._changed.wait_for(lambda: self.done >= wanted or self.wrong, TIMEOUT_S)
            assert not self.wrong, self.wrong
            assert self.done >= wanted, f"nothing is done any more: {self.failed}"
        return time.monotonic() - began

    def _work(self, number: int) -> None:
        each = SHAPE.num_blocks // self.workers
        mine = Blocks(tuple(range(number * each, (number + 1) * each)), number)
        try:
            for count in itertools.count():
                if self._over:
                    return
                kv = Kv.random(TOKENS[count % 2])
                self._count(self._one(f"{self.source.name}-{number}-{count}", kv, mine))
        except BaseException as error:  # noqa: BLE001  the test shows it
            with self._changed:
                self.wrong.append(repr(error))
                self._changed.notify_all()

    def _one(self, request_id: str, kv: Kv, mine: Blocks) -> str:
        """The code with which it failed; empty when it arrived whole."""
        blocks = Blocks(mine.ids[: -(-kv.tokens // SHAPE.block_size)], mine.state)
        lease, failed = None, ""
        try:
            lease = self.source.publish(request_id, kv, blocks)
            self.reader.receive(request_id, blocks, self.source)
        except KvferryError as error:
            failed = error.code
            (self.source if lease is None else self.reader).quiet(error)
        else:
            if not self._arrived(kv, blocks):
                raise AssertionError(f"{request_id} is done and holds other bytes")
        if lease is not None:
            if failed:
                with suppress(KvferryError):
                    self.source.client.abort(request_id)
            with suppress(KvferryError):  # its daemon has gone
                lease.ended.result(TIMEOUT_S)
        if failed:
            for engine in (self.source, self.reader):
                assert engine.attached.wait(TIMEOUT_S), f"{engine.name} does not come back"
        return failed

    def _arrived(self, kv: Kv, blocks: Blocks) -> bool:
        paged, state = SHAPE.arrays(0, self.reader.held())
        at = np.arange(kv.tokens)
        ids = np.asarray(blocks.ids)[at // SHAPE.block_size]
        held = paged[:, :, ids, at % SHAPE.block_size]
        return np.array_equal(held, kv.paged) and np.array_equal(state[blocks.state], kv.state)

    def _count(self, failed: str) -> None:
        with self._changed:
            if failed:
                self.failed[failed] += 1
            else:
                self.done += 1
            self._changed.notify_all()
