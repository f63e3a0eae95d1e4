"""The agent against another process that stops, goes and comes under another name."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from asyncio import Handle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fleet import TCP_ALONE

from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import Metadata, parse
from kvferryd.transport.nixl import FIRST_READ_S
from kvferryd.transport.read import CHUNK_DESCRIPTORS, Read, Span, TransportError
from kvferryd.transport.screen import Screen
from support import refused

pytestmark = pytest.mark.anyio
WAIT_S = 30.0
WORD = 8


@dataclass
class Source:
    process: subprocess.Popen[str]
    peer: Metadata
    span: Span

    @property
    def name(self) -> str:
        return self.peer.alias

    def word(self, index: int) -> int:
        return self.span.address + WORD * index


@dataclass
class Reader:
    agent: Agent
    memory: np.ndarray[tuple[int], np.dtype[np.uint64]]

    def read(self, source: Source, first: int, words: int) -> Read:
        """Words of the source into the same words here."""
        rows = [
            np.array([(base + WORD * first, WORD * words, 0)], dtype=np.uint64)
            for base in (self.memory.ctypes.data, source.span.address)
        ]
        return self.agent.read(source.name, rows[0], rows[1], "DRAM", "DRAM")


@contextmanager
def a_source() -> Iterator[Source]:
    name = f"source-{uuid.uuid4().hex}"
    command = [sys.executable, str(Path(__file__).with_name("agent_source.py")), name]
    quiet = os.environ | {"NIXL_LOG_LEVEL": "ERROR"}  # NIXL writes to stdout
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        assert process.stdout is not None
        try:
            address, nbytes, metadata = json.loads(process.stdout.readline())
            yield Source(process, parse(name, bytes.fromhex(metadata)), Span(address, nbytes, "host"))
        finally:
            process.kill()  # it may stand still


@pytest.fixture
def source() -> Iterator[Source]:
    with a_source() as source:
        yield source


@asynccontextmanager
async def a_reader(source: Source) -> AsyncIterator[Reader]:
    agent = Agent(f"reader-{uuid.uuid4().hex}")
    await agent.start()
    memory = np.zeros(source.span.nbytes // WORD, dtype=np.uint64)
    await agent.register(Span(memory.ctypes.data, memory.nbytes, "host"))
    await agent.add_peer(source.peer)
    await agent.warm(source.name, source.span)
    try:
        yield Reader(agent, memory)
    finally:
        await agent.close()


@pytest.fixture
async def reader(source: Source) -> AsyncIterator[Reader]:
    async with a_reader(source) as reader:
        yield reader


@pytest.mark.parametrize("alone", [True, False])
async def test_words_are_those_of_the_peer_whoever_posts_them(source: Source, reader: Reader, alone: bool) -> None:
    async with asyncio.timeout(WAIT_S):
        found = [await reader.agent.peek(source.name, source.word(index)) for index in range(1, 200)]
        beside = reader.read(source, 0, len(reader.memory))  # on the thread, which is in NIXL for a while
        found += await asyncio.gather(
            *(reader.agent.peek(source.name, source.word(index), alone=alone) for index in range(200, 1000))
        )
        await beside.done
    assert found == list(range(1, 1000))
    assert (reader.memory == np.arange(len(reader.memory), dtype=np.uint64)).all()


@contextmanager
def held_up() -> Iterator[None]:
    """The agent's thread is held up after each message to the loop, until the loop has acted on it."""
    loop, here = asyncio.get_running_loop(), threading.current_thread()
    send = loop.call_soon_threadsafe

    def send_and_wait(callback: Callable[..., object], *arguments: object, context: Context | None = None) -> Handle:
        handle = send(callback, *arguments, context=context)
        if threading.current_thread() is not here:
            acted = threading.Event()
            send(lambda: loop.call_soon(lambda: loop.call_soon(acted.set)))
            acted.wait(WAIT_S)
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", send_and_wait)
        yield


async def test_reads_take_turns_chunk_by_chunk_and_urgent_ones_come_first(source: Source, reader: Reader) -> None:
    """All three wait when the thread turns to them; the last one is urgent, the second a third of the first."""
    ended, busy = [], threading.Event()
    reader.agent._hand_over(busy.wait)
    first, reads = 0, []
    for name, chunks, priority in (("long", 3, 0), ("short", 1, 0), ("urgent", 2, 1)):
        words = np.arange(first, first := first + chunks * CHUNK_DESCRIPTORS, dtype=np.uint64)
        rows = [np.zeros((len(words), 3), dtype=np.uint64) for _ in range(2)]
        for row, base in zip(rows, (reader.memory.ctypes.data, source.span.address), strict=True):
            row[:, 0], row[:, 1] = base + WORD * words, WORD
        reads.append(reader.agent.read(source.name, *rows, "DRAM", "DRAM", priority))
        reads[-1].done.add_done_callback(lambda _, name=name: ended.append(name))
    busy.set()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(read.done for read in reads))
    assert ended == ["urgent", "short", "long"]
    assert (reader.memory[:first] == np.arange(first, dtype=np.uint64)).all()


async def test_a_read_is_quiet_by_the_time_that_it_is_done(source: Source, reader: Reader) -> None:
    """An engine reserves the blocks of a transfer again as soon as it is done, and that is refused while a read of it
    is not quiet."""
    async with asyncio.timeout(WAIT_S):
        with held_up():
            read = reader.read(source, 0, len(reader.memory))
            await read.done
            assert read.quiet.done()


@pytest.mark.parametrize("alone", [True, False])
async def test_the_place_of_a_word_is_not_used_again_before_its_value_is_taken(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)  # over TCP no word arrives inside the post
    with a_source() as source:
        async with asyncio.timeout(WAIT_S), a_reader(source) as reader:
            with held_up():
                peeks = []
                for index in range(1, 2000):
                    peek = reader.agent.peek(source.name, source.word(index), alone=alone)
                    peeks.append(asyncio.create_task(peek))
                    await asyncio.sleep(0)  # another in each turn of the loop, whatever the others wait for
                assert await asyncio.gather(*peeks) == list(range(1, 2000))


async def test_a_peer_that_gets_no_cpu_is_tried_for_as_long_as_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)  # the source's process has to answer
    screen = Screen()
    try:
        with a_source() as source:
            await screen.prepare()
            source.process.send_signal(signal.SIGSTOP)
            checking = asyncio.create_task(screen.check(source.peer, [source.span], WAIT_S))
            await asyncio.wait({checking}, timeout=FIRST_READ_S + 1)  # longer than a first read may take elsewhere
            source.process.send_signal(signal.SIGCONT)
            await checking
    finally:
        await screen.close()


async def test_a_screening_process_that_died_before_it_was_asked_says_nothing_of_a_peer(source: Source) -> None:
    """It may have been killed at the very moment of the question."""
    for ended in (False, True):
        screen = Screen()
        try:
            await screen.prepare()
            assert screen._common is not None
            process = screen._common._process
            process.kill()
            if ended:
                await process.wait()
            await screen.check(source.peer, [source.span], WAIT_S)
        finally:
            await screen.close()


async def test_screening_processes_that_die_before_they_are_asked_are_not_started_for_ever(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, start = Screen(), Screen._start

    async def dies(screen: Screen) -> object:
        started = await start(screen)
        started._process.kill()
        await started._process.wait()
        return started

    monkeypatch.setattr(Screen, "_start", dies)
    with refused("transport_failed", TransportError):
        await asyncio.wait_for(screen.check(source.peer, [source.span], WAIT_S), WAIT_S)


async def test_a_word_of_a_peer_that_is_gone_fails(source: Source, reader: Reader) -> None:
    for index in range(1, 10):
        assert await reader.agent.peek(source.name, source.word(index)) == index
    source.process.kill()
    source.process.wait(WAIT_S)
    async with asyncio.timeout(WAIT_S):
        for alone in (True, False, True):
            with pytest.raises(TransportError):
                await reader.agent.peek(source.name, source.word(1), alone=alone)


async def test_a_word_of_a_peer_that_was_removed_fails(source: Source, reader: Reader) -> None:
    for index in range(1, 10):
        assert await reader.agent.peek(source.name, source.word(index)) == index
    await reader.agent.remove_peer(source.name)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(TransportError):
            await reader.agent.peek(source.name, source.word(1))


async def test_a_peer_is_removed_while_the_agent_closes_and_afterwards(source: Source, reader: Reader) -> None:
    async with asyncio.timeout(WAIT_S):
        closing = asyncio.create_task(reader.agent.close())
        await asyncio.gather(reader.agent.remove_peer(source.name), closing)
        await reader.agent.remove_peer(source.name)


async def test_nothing_is_written_once_the_agent_is_closed(source: Source, reader: Reader) -> None:
    """The source stands still meanwhile: over some lanes its reads stay under way until then."""
    async with asyncio.timeout(WAIT_S):
        await reader.agent.peek(source.name, source.word(1))
        source.process.send_signal(signal.SIGSTOP)
        reads = [reader.read(source, first, 64) for first in range(0, 64 * 100, 64)]
        words = [asyncio.ensure_future(reader.agent.peek(source.name, source.word(index))) for index in range(1, 50)]
        await asyncio.sleep(0)
        assert await reader.agent.close()
        await asyncio.gather(*(read.quiet for read in reads), *words, return_exceptions=True)
        assert all(read.done.done() for read in reads)
        whole = [index for index, read in enumerate(reads) if read.done.exception() is None]
        for index in whole:
            assert (reader.memory[64 * index : 64 * (index + 1)] == np.arange(64 * index, 64 * (index + 1))).all()
        reader.memory[:] = 7
        source.process.send_signal(signal.SIGCONT)
        assert source.process.stdin is not None
        source.process.stdin.close()
        await asyncio.to_thread(source.process.wait, WAIT_S)
    assert (reader.memory == 7).all()


async def test_no_descriptors_for_the_process_that_tries_metadata_is_told_as_such(source: Source) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    screen = Screen()
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(TransportError, match="cannot be started"):
            await screen.check(source.peer, [], WAIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await screen.check(source.peer, [], WAIT_S) is None
    await screen.close()


async def stopped_while_read(source: Source, reader: Reader) -> Read:
    """A read that is really under way: its source stands still."""
    source.process.send_signal(signal.SIGSTOP)
    read = reader.read(source, 0, len(reader.memory))
    while not read.in_flight:
        await reader.agent.register()  # the agent's thread takes turns: some of these later it has posted the read
    read.abandon()
    assert not read.quiet.done()
    return read


@pytest.mark.parametrize("again", [False, True])
async def test_a_peer_that_is_removed_is_unloaded_when_its_last_read_is_quiet_unless_it_was_added_again(
    monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    """Over TCP: with CMA a read is over inside NIXL's post, and none is ever seen under way."""
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    with a_source() as source:
        async with a_reader(source) as reader, asyncio.timeout(WAIT_S):
            read = await stopped_while_read(source, reader)
            await reader.agent.remove_peer(source.name)
            if again:
                await reader.agent.add_peer(source.peer)
            source.process.send_signal(signal.SIGCONT)
            await read.quiet
            if again:
                assert await reader.agent.peek(source.name, source.word(7)) == 7
                await reader.agent.remove_peer(source.name)
            with pytest.raises(TransportError):
                await reader.agent.peek(source.name, source.word(7))
