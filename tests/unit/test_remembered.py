"""Peers that the daemon before has noted are read with suspicion."""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_channels_of_ranks import first_of

from kvferry.file import File
from kvferry.protocol.peers_wanted import GONE_S, HAD
from kvferry.protocol.values import ReaderId
from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.inbound import Inbound
from kvferryd.peers.peers import Peers
from kvferryd.peers.remembered import ENGINES, NOBODY, Known, Remembered

MET = (("a", "h:1"),)


class Own:
    """As much of an engine as its readers concern."""

    engine_id = "own"

    def __init__(self) -> None:
        self.session: Any = SimpleNamespace(retiring=False)


@pytest.fixture
def opened() -> Callable[[], File]:
    """Another descriptor of one file, as each daemon has it."""
    file = File(os.memfd_create("peers"))
    return lambda: File(os.dup(file.fileno()))


def written(said: object, **header: int) -> bytes:
    body = json.dumps(said).encode()
    about = {"crc": zlib.crc32(body), "nbytes": len(body)} | header
    return b"%08x %d\n%b" % (about["crc"], about["nbytes"], body)


def put(opened: Callable[[], File], said: bytes) -> None:
    with opened() as file:
        os.pwrite(file.fileno(), said, 0)


def test_the_next_daemon_knows_what_was_put_last(opened: Callable[[], File]) -> None:
    ours = Remembered(opened())
    assert ours.of("reader") == NOBODY
    ours.put("other", met=[("x", "h:1")], readers=[("y", 1, 0.0), ("y", 0, 5.5)])
    ours.put("reader", met=[("a", "h:1"), ("b", "h:2")])
    ours.put("reader", met=[("b", "h:2")])
    ours.put("other", met=[])
    theirs = Remembered(opened())
    assert theirs.of("reader") == Known(met=(("b", "h:2"),))
    assert theirs.of("other") == Known(readers=(("y", 0, 5.5), ("y", 1, 0.0)))


def test_without_a_keeper_nothing_is_remembered() -> None:
    ours = Remembered()
    ours.put("reader", met=MET)
    assert ours.of("reader") == NOBODY


@pytest.mark.parametrize(
    "found",
    [
        b"",
        b"\n",
        b"\xff\xfe",
        b"0 0\n",
        b"-1 -5\n{}",
        written({"reader": [[["a", "h:1"]], []]})[:-4],
        written({"reader": [[["a", "h:1"]], []]}, crc=1),
        written({"reader": [[["a", "h:1"]], []]}, nbytes=9),
        written({"reader": [[["a", 1]], []]}),
        written({"reader": [[["", "h:1"]], []]}),
        written({"reader": [["a"], []]}),
        written({"reader": [[], [["a", "0", 0]]]}),
        written({"reader": [[], [["a", 0]]]}),
        written({"reader": [[["a", "h:1"]]]}),
        written({"reader": {"a": "h:1"}}),
        written({"reader": 5}),
        written([["a", "h:1"]]),
        written(None),
        written({})[:-2] + b"[" * 100_000,
        written({"reader": "\ud800"}),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_tells_nothing(opened: Callable[[], File], found: bytes) -> None:
    put(opened, found)
    ours = Remembered(opened())
    assert ours.of("reader") == NOBODY
    ours.put("reader", met=MET)
    assert Remembered(opened()).of("reader").met == MET, "it is written over"


def test_it_reads_so_much_of_what_another_version_has_written(opened: Callable[[], File]) -> None:
    many = [[f"a{number}", "h:1"] for number in range(2 * HAD)]
    put(opened, written({f"reader{number}": [many[-3:], []] for number in range(2 * ENGINES)}))
    assert Remembered(opened()).of("reader0") == NOBODY
    put(opened, written({"reader": [many, [["a", rank, 0] for rank in range(2 * HAD)]]}))
    known = Remembered(opened()).of("reader")
    assert known.met == tuple(map(tuple, many[HAD:]))
    assert len(known.readers) == HAD


def test_a_file_that_cannot_be_written_harms_nobody() -> None:
    ours = Remembered(File(os.open("/dev/null", os.O_RDONLY)))
    ours.put("reader", met=MET)
    assert ours.of("reader").met == MET


@pytest.mark.anyio
async def test_an_engine_waits_for_those_that_it_had_met_until_they_are_met_or_missed(
    opened: Callable[[], File],
) -> None:
    Remembered(opened()).put("e", met=[("gone", "127.0.0.1:9")])
    peers, engine = Peers(Config(), Metrics(), None, Remembered(opened())), first_of()
    peers.expect(engine)
    assert peers.awaited(engine) == 1
    async with asyncio.timeout(60):
        while peers.awaited(engine):  # noqa: ASYNC110  it ends by time as well
            await asyncio.sleep(0.01)
    await peers.forget_engine(engine)
    await peers.close()


def test_readers_that_have_left_lately_are_awaited_and_no_others(opened: Callable[[], File]) -> None:
    now, engine = time.monotonic(), Own()
    readers = [("reads", 0, 0.0), ("left now", 0, now), ("left long ago", 0, now - GONE_S)]
    Remembered(opened()).put("own", readers=readers)
    inbound = Inbound(Remembered(opened()))
    inbound.expect(engine)
    assert inbound.awaited(engine) == 2
    with inbound.reading(engine, ReaderId("reads", "1", 0, 1)), inbound.reading(engine, ReaderId("new", "1", 0, 1)):
        assert inbound.awaited(engine) == 1
        assert {each[0] for each in Remembered(opened()).of("own").readers} == {"left now", "reads", "new"}
        engine.session.retiring = True
    assert [each[2] for each in Remembered(opened()).of("own").readers] == [0.0] * 3, "it was we who ended the streams"
