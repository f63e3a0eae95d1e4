"""Fences: the page of words that two processes share, and publishes that readers see only when a word has its value."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import KvferryError
from kvferry.memory import cuda
from kvferry.memory.fences import NBYTES, WORDS, Fence, Fences
from kvferry.memory.handover import sealed_file
from kvferry.protocol import events
from kvferry.protocol.lease import Lease
from kvferry.protocol.values import Publication, ReaderId, Reading
from kvferry.schemas import LeaseState
from kvferry.tables import BlockTable
from kvferryd.engine import fences as watched
from kvferryd.leases.leases import Leases
from support import refused

pytestmark = pytest.mark.anyio
TABLES = {"full": BlockTable.of([4, 7])}
LONG_S, SHORT_S = 60.0, 0.05
MANY, HELD = 3000, 10_000


@pytest.fixture
def page() -> Iterator[Fences]:
    """The engine's side."""
    page = Fences()
    yield page
    page.close()


@pytest.fixture
async def watch(page: Fences) -> AsyncIterator[watched.Fences]:
    """The daemon's side."""
    watch = watched.Fences([page.file.fileno()])
    page.handed()
    yield watch
    await watch.close()


@pytest.fixture
async def leases() -> Leases:
    return Leases("prefill", "1", lambda account: None, 8)


def publish(leases: Leases, num_tokens: int = 8, request_id: str = "r", **more: Any) -> Lease:
    told = {"tables": TABLES, "more": False, "metadata": b"", "ttl_s": LONG_S, "after": None} | more
    ttl_s, after = told.pop("ttl_s"), told.pop("after")
    lease = leases.get(request_id)
    number = lease.number if lease is not None else leases.source.leases.newest(request_id) + 1
    said = Publication(num_tokens=num_tokens, **told)
    leases.publish(request_id, number, said, ttl_s=ttl_s, readers=1, after=after)
    lease = leases.get(request_id)
    assert lease is not None
    return lease


class Reader:
    """Hears when there is more to tell than that there is nothing to read yet."""

    def __init__(self, leases: Leases, request_id: str) -> None:
        self.heard, self._leases = asyncio.Event(), leases
        self._stream = leases.connect(self, ReaderId("decode", "1", 0, 1), announcing=False)  # type: ignore[arg-type]
        leases.on(events.Ask(Reading(self._stream, 1), request_id))

    def speak(self, reading: int) -> None:
        if not isinstance(self._leases.take(self._stream, reading), events.Unpublished):
            self.heard.set()


async def seen(leases: Leases, request_id: str = "r") -> None:
    """A reader of it sees something."""
    await lasting(Reader(leases, request_id).heard.wait())


async def lasting(wait: Any) -> Any:
    async with asyncio.timeout(60):
        return await wait


async def quiet() -> None:
    """Long enough for the thread to have looked, and the loop to have run."""
    await asyncio.sleep(SHORT_S)


# the words


async def test_a_fence_is_reached_when_its_word_has_the_value(page: Fences, watch: watched.Fences) -> None:
    first, second = page.take(), page.take()
    waits = [watch.reached(fence, LONG_S) for fence in (first, second)]
    page.reach(second)
    await lasting(waits[1])
    await quiet()
    assert not waits[0].done()
    page.reach(first)
    await lasting(waits[0])
    assert watch.reached(first, LONG_S).done(), "at once"


async def test_a_fence_that_is_not_reached_in_time_says_so(page: Fences, watch: watched.Fences) -> None:
    with refused("fence_timeout", match="did not reach") as told:
        await lasting(watch.reached(page.take(), SHORT_S))
    assert told.value.remedy


async def test_a_look_whose_time_is_up_before_it_begins_is_no_wait_for_ever(
    page: Fences, watch: watched.Fences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine: each second wait comes while the thread, whose first look is over, is not let run."""
    monkeypatch.setattr(watched, "SHORTEST_S", 1e-6)
    for _ in range(MANY):
        first, second = page.take(), page.take()
        waits = [watch.reached(first, LONG_S)]
        await asyncio.sleep(0)
        sum(range(HELD))
        waits.append(watch.reached(second, LONG_S))
        await asyncio.sleep(0)
        page.reach(first)
        page.reach(second)
        await lasting(asyncio.gather(*waits))


async def test_a_word_is_used_again_only_when_its_value_has_arrived(page: Fences) -> None:
    pending = page.take()
    for _ in range(3 * WORDS):
        fence = page.take()
        assert fence.word != pending.word
        page.reach(fence)
    assert page.pending == [pending.word]
    page.reach(pending)
    assert {page.take().word for _ in range(WORDS)} == set(range(WORDS))
    with refused("too_many_fences"):
        page.take()


async def test_what_is_no_fence_is_refused(watch: watched.Fences) -> None:
    for fence in (Fence(WORDS, 1), Fence(-1, 1), Fence(0, 0)):
        with refused("malformed_fence"):
            watch.reached(fence, LONG_S)


async def test_a_page_that_could_shrink_under_the_daemon_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(NBYTES))
    loose = os.memfd_create("loose")
    os.ftruncate(loose, NBYTES)
    short = sealed_file("short", 8)
    plain = os.open(tmp_path / "file", os.O_RDWR)
    try:
        for file in (loose, short, plain):
            with refused("region_unavailable"):
                watched.Fences([file])
        with pytest.raises(KvferryError):
            watched.Fences([])
    finally:
        for file in (loose, short, plain):
            os.close(file)


async def test_the_writer_may_be_another_process_that_is_killed(page: Fences) -> None:
    """The daemon's side of an engine that writes in its own time, and then dies."""
    watch = watched.Fences([page.file.fileno()])
    fence, never = page.take(), page.take()
    script = (
        "import mmap, struct, sys; held = mmap.mmap(int(sys.argv[1]), 4096); sys.stdin.readline();"
        "struct.pack_into('=Q', held, 8 * int(sys.argv[2]), int(sys.argv[3])); sys.stdin.read()"
    )
    arguments = [str(page.file.fileno()), str(fence.word), str(fence.value)]
    command = [sys.executable, "-c", script, *arguments]
    engine = subprocess.Popen(command, pass_fds=[page.file.fileno()], stdin=subprocess.PIPE)  # noqa: ASYNC220  # killed below
    assert engine.stdin is not None
    try:
        wait = watch.reached(fence, LONG_S)
        engine.stdin.write(b"now\n")
        engine.stdin.flush()
        await lasting(wait)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        engine.stdin.close()
    with pytest.raises(KvferryError, match="did not reach"):
        await lasting(watch.reached(never, SHORT_S))
    await watch.close()


async def test_nobody_looks_when_nobody_waits(page: Fences, watch: watched.Fences) -> None:
    waiting = watch.reached(page.take(), LONG_S)
    waiting.cancel()
    await quiet()
    await watch.close()
    assert not any(thread.name == "fences" for thread in threading.enumerate())


async def test_a_page_that_is_closed_is_not_registered(page: Fences) -> None:
    """A thread that was to register it may begin late: nothing would take that back."""
    page.close()
    with refused("session_closed"):
        page.register(cuda.Device(0, "GPU-of-nobody"))


async def test_a_fence_asks_for_a_gpu(page: Fences) -> None:
    try:
        cuda.devices()
    except KvferryError:
        with refused("cuda_missing"):
            page.after(0)
        assert page.pending == []


# publishes


async def test_a_racing_writer_is_never_seen_halfway(page: Fences, watch: watched.Fences, leases: Leases) -> None:
    """The writer is a thread that fills memory and then reaches its fence, as a stream does. Without the fence the
    reader sees old bytes: the race is real."""
    memory, going = np.zeros(8 << 20, dtype=np.uint8), threading.Event()

    def write(value: int, fence: Fence) -> None:
        going.wait(60)
        for part in np.array_split(memory, 64):
            part[:] = value
        page.reach(fence)

    for value in range(1, 11):
        fence = page.take()
        writer = threading.Thread(target=write, args=(value, fence))
        writer.start()
        publish(leases, request_id=f"r{value}", after=watch.reached(fence, LONG_S))
        assert int(memory.max()) == value - 1, "who does not wait sees old bytes"
        going.set()
        await seen(leases, f"r{value}")
        assert (int(memory.min()), int(memory.max())) == (value, value)
        writer.join(60)
        going.clear()
        leases.revoke(f"r{value}", "seen")


async def test_a_lease_that_ends_waits_for_no_fence(page: Fences, watch: watched.Fences, leases: Leases) -> None:
    """Aborted, say: what its stream was still to write is not published."""
    waiting = watch.reached(page.take(), LONG_S)
    lease = publish(leases, after=waiting)
    leases.revoke("r", "aborted")
    assert waiting.cancelled() and not leases._fences
    await quiet()
    assert lease.state is LeaseState.REVOKED


async def test_a_fence_that_is_reached_already_keeps_nobody_waiting(
    page: Fences, watch: watched.Fences, leases: Leases
) -> None:
    fence = page.take()
    page.reach(fence)
    assert publish(leases, after=watch.reached(fence, LONG_S)).version == 1
