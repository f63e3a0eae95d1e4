"""Peers that the daemon before has noted are read with suspicion."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable

import pytest

from kvferry.file import File
from kvferry.protocol.peers_wanted import HAD
from kvferryd.peers.remembered import ENGINES, NOBODY, Known, Remembered

MET = (("a", "h:1"),)


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
