"""A daemon may die, or be upgraded, under living engines: they notice failed transfers and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from bounded import bounded
from fleet import TIMEOUT_S, open_files
from keepers import ROOT, before_this, children, eventually, kill, lives, path_of, serving
from load import SHAPE, Engine, Load
from ranks import Blocks, Kv
from wire import TCP

from kvferry.errors import KvferryError
from kvferry.schemas import SourceBody
from kvferryd.commands.cli import main
from kvferryd.demo import fleet
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.process.keeper import HELP

START_S = 5 * TIMEOUT_S
"""Seconds for the start of a keeper and its daemon, on a machine with other work."""
DEATHS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]
Seen = Callable[[str, object], None]


@pytest.fixture
def pair(own_fleet: Fleet, request: pytest.FixtureRequest) -> list[DaemonService]:
    """A source's daemon and a reader's, each under a keeper."""
    flags = getattr(request, "param", ())
    daemons = [own_fleet.daemon(name, kept=True, flags=flags) for name in ("source", "reader")]
    asyncio.run(own_fleet.ready(*daemons, timeout_s=START_S))
    return daemons


@pytest.fixture
def kept(own_fleet: Fleet) -> DaemonService:
    """A daemon under a keeper."""
    daemon = own_fleet.daemon("kept", kept=True)
    asyncio.run(own_fleet.ready(daemon, timeout_s=START_S))
    return daemon


@pytest.fixture
def load(pair: list[DaemonService], request_id: str) -> Iterator[Load]:
    engines = [Engine(f"{daemon.name}-{request_id[-8:]}", daemon, "1") for daemon in pair]
    yield Load(*engines)
    for engine in engines:
        engine.client.close()


def stands_by(daemon: DaemonService) -> bool:
    return len(children(daemon)) == 2


def in_mid_read(load: Load, source: DaemonService, reader: DaemonService) -> int:
    """The source's process, which stands still while a read from it is under way."""
    for _ in range(100):
        pid = serving(source)
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:  # announced transfers begin without the source
            found = httpx.get(f"{reader.url}/v1/transfers", params={"state": "reading"}, trust_env=False, timeout=60)
            if found.json()["transfers"]:
                return pid
        os.kill(pid, signal.SIGCONT)
        load.more(1)
    raise AssertionError("no read was under way")


@pytest.mark.parametrize(
    "kills",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
)
def test_a_daemon_that_is_killed_under_load_costs_failed_requests_only(
    load: Load, pair: list[DaemonService], kills: int, record_property: Seen
) -> None:
    rng, recovered = random.Random(1), []
    with load.running():
        load.more()
        for daemon in pair:
            eventually(lambda daemon=daemon: stands_by(daemon), "another daemon stands by")
        before = [open_files(daemon) for daemon in pair]
        for count, number in zip(range(kills), itertools.cycle(DEATHS), strict=False):
            victims = [pair, pair[:1], pair[1:]][count % 3]
            gone = [(daemon, kill(daemon, number)) for daemon in victims]
            recovered.append(load.more(1))
            for daemon, pid in gone:
                eventually(lambda daemon=daemon, pid=pid: serving(daemon) != pid, "another daemon serves")
            load.more(rng.randrange(5, 15))
    assert load.failed.total() >= kills // 4, "so many deaths under load end some requests"
    for daemon, files in zip(pair, before, strict=True):
        eventually(lambda daemon=daemon: stands_by(daemon), "another daemon stands by")
        assert open_files(daemon) <= files, "the keeper has kept something of the dead"
    codes = ", ".join(f"{count} {code}" for code, count in load.failed.most_common())
    worst = f"{max(recovered):.1f}"
    record_property("seen", [f"daemon killed {kills} times", f"{load.done} done, 0 wrong; failed: {codes}", "", worst])


@pytest.mark.parametrize("pair", [TCP], indirect=True)
@pytest.mark.parametrize(
    "times",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_what_ucx_does_when_a_reader_dies_in_mid_read_costs_the_source_failed_requests_only(
    load: Load, pair: list[DaemonService], times: int, record_property: Seen
) -> None:
    """Over TCP a source that stands still while its reader dies may be aborted by UCX when it goes on."""
    source, reader = pair
    aborted = 0
    with load.running():
        load.more()
        for _ in range(times):
            pid, gone = in_mid_read(load, source, reader), serving(reader)
            os.kill(gone, signal.SIGKILL)
            eventually(lambda gone=gone: gone not in children(reader), "the reader's daemon is dead")
            os.kill(pid, signal.SIGCONT)
            load.more()
            aborted += serving(source) != pid
    died = f"source died {aborted} times"
    record_property("seen", [f"reader killed in mid-read {times} times, over TCP", died, "", ""])


def test_the_history_outlives_the_daemons_of_a_keeper(
    load: Load, pair: list[DaemonService], capsys: pytest.CaptureFixture[str]
) -> None:
    """The request that was under way is listed, with its end, by the daemon after the next, too."""
    source, reader = pair
    with load.running():
        load.more()
    half, blocks = f"half-{load.source.name}", Blocks((0, 1, 2, 3), 0)
    load.source.client.publish(half, blocks.tables(), 10, more=True)
    named = SourceBody(engine_id=load.source.name, address=source.peer)
    receiving = load.reader.client.receive(half, blocks.tables(), source=named)

    def under_way() -> list[str]:
        records = asked(reader, f"/v1/transfers?request_id={half}")["transfers"]
        return [each["transfer_id"] for each in records if each["waits_for"] == "publish"]

    eventually(under_way, "half of it is read")
    (half_read,) = under_way()
    died = kill(reader, signal.SIGKILL)
    with pytest.raises(KvferryError):
        receiving.result(TIMEOUT_S)
    eventually(lambda: serving(reader) != died, "another daemon serves")
    before = serving(reader)
    reader.signal(signal.SIGHUP)
    eventually(lambda: serving(reader) != before, "the new one serves")

    records = {each["transfer_id"]: each for each in asked(reader, "/v1/transfers?limit=1000")["transfers"]}
    died_with = records[half_read]
    assert (died_with["state"], died_with["error"]["code"]) == ("failed", "daemon_died")
    assert "SIGKILL" in died_with["error"]["message"] and died_with["source"]["engine_id"] == load.source.name
    assert Counter(each["state"] for each in records.values())["done"] == load.done

    main(("status", "--daemon", reader.url))
    (last,) = [line for line in capsys.readouterr().out.splitlines() if "failed: " in line]
    assert f"request {half} at " in last and " daemon_died: " in last

    told = asked(reader, "/v1/history?peers=true")
    (peer,) = told["peers"]
    points = told["points"]
    assert peer["engine_id"] == load.source.name
    assert load.done == peer["done"] == sum(each["done"] for each in points)
    assert peer["failures"]["daemon_died"] == sum(each["failures"].get("daemon_died", 0) for each in points) == 1
    assert peer["p50_ms"] <= peer["p99_ms"] and peer["read_bytes"] > 0
    marks = [(each["kind"], each["why"]) for each in told["marks"]]
    death = ("death", "it was ended by SIGKILL")
    assert marks[:3] == [("start", ""), death, ("start", death[1])]
    assert [kind for kind, _ in marks[3:]] == ["drain", "stop", "upgrade"]
    served = [each["served_bytes"] for each in asked(source, "/v1/history")["points"]]
    assert sum(served) == peer["read_bytes"]


def asked(daemon: DaemonService, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{daemon.url}{path}", trust_env=False, timeout=60).raise_for_status().json()
    return answer


def test_the_next_daemon_has_all_that_the_one_before_had(
    load: Load, pair: list[DaemonService], request_id: str, record_property: Seen
) -> None:
    """Memory with what is in it, manifest, epoch; and it serves, without an engine that was started again."""
    source, reader = load.source, load.reader
    kv, blocks = Kv.random(40), Blocks((3, 1, 4), 5)
    source.publish(f"{request_id}-before", kv, blocks)
    engines = httpx.get(f"{pair[0].url}/v1/engines", trust_env=False).json()
    held, gone = source.memory.copy(), serving(pair[0])
    eventually(lambda: stands_by(pair[0]), "another daemon stands by")
    began = time.monotonic()
    os.kill(gone, signal.SIGKILL)
    assert "has gone" in source.said.get(timeout=TIMEOUT_S)
    assert "there again" in source.said.get(timeout=TIMEOUT_S)
    took_s = time.monotonic() - began
    eventually(lambda: serving(pair[0]) != gone, "the next one says so: engines may come before its line is written")
    assert httpx.get(f"{pair[0].url}/v1/engines", trust_env=False).json() == engines
    assert np.array_equal(source.memory, held)
    source.client.publish(request_id, blocks.tables(), kv.tokens)  # its bytes were written before the death
    reader.receive(request_id, blocks, source)
    assert SHAPE.wrong(0, reader.held(), kv, blocks) == 0
    record_property("seen", ["source's daemon killed under a keeper", "registered again", "", f"{took_s:.2f}"])


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, id="stopped", marks=pytest.mark.long),
    ],
)
def test_an_engine_outlives_the_step_to_a_keeper_and_back(
    own_fleet: Fleet, request_id: str, number: signal.Signals
) -> None:
    """serve, keep, serve at the same addresses: the engine hears that its daemon has gone and is there again."""
    daemons = [own_fleet.daemon(name) for name in ("source", "reader")]
    asyncio.run(own_fleet.ready(*daemons, timeout_s=START_S))
    engines = [Engine(f"{daemon.name}-{request_id[-8:]}", daemon, "1") for daemon in daemons]
    load = Load(*engines)
    with load.running():
        load.more()
        for command in ("keep", "serve"):
            for nth, engine in enumerate(engines):
                of_keeper = children(engine.daemon)
                engine.daemon.signal(number)
                assert "has gone" in engine.said.get(timeout=TIMEOUT_S)
                engine.daemon.process.wait(TIMEOUT_S)
                eventually(lambda each=of_keeper: not any(map(lives, each)), "the keeper's daemons are dead")
                engine.daemon = daemons[nth] = own_fleet.again(engine.daemon, command)
                assert "there again" in engine.said.get(timeout=START_S)
                load.more()
    for engine in engines:
        engine.client.close()


@pytest.mark.slow
def test_daemons_that_die_again_and_again_wait_for_their_turn(kept: DaemonService) -> None:
    """The keeper says so; and being told to stop meanwhile, it ends at once, as the last one has."""
    eventually(lambda: stands_by(kept), "another daemon stands by")
    pids: set[int] = set()

    def died() -> bool:
        if (pid := serving(kept)) not in pids:
            pids.add(pid)
            os.kill(pid, signal.SIGKILL)
        return "daemons in a row have not lasted" in kept.log.read_text()

    eventually(died, "the keeper waits")
    assert "it was ended by SIGKILL. The next one's turn is in 0.5 s" in kept.log.read_text()
    eventually(lambda: died() and "turn is in 4 s" in kept.log.read_text(), "the longest pause")
    kept.signal(signal.SIGTERM)
    assert kept.process.wait(TIMEOUT_S) == 128 + signal.SIGKILL
    told = [json.loads(line) for line in kept.log.read_text().splitlines() if "kvferry keep:" in line]
    assert {(line["logger"], line["level"]) for line in told} == {("kvferryd.process.keeper", "warning")}


def test_a_keeper_that_ends_takes_its_daemons_with_it(own_fleet: Fleet, kept: DaemonService) -> None:
    """Killed: or the next keeper could not start one. And told to stop."""
    eventually(lambda: stands_by(kept), "another daemon stands by")
    left = children(kept)
    kept.signal(signal.SIGKILL)
    kept.process.wait(TIMEOUT_S)
    eventually(lambda: not any(map(lives, left)), "they are dead")
    again = own_fleet.again(kept)
    asyncio.run(own_fleet.ready(again, timeout_s=TIMEOUT_S))
    left = children(again)
    again.signal(signal.SIGTERM)
    assert again.process.wait(TIMEOUT_S) == 0
    assert '"stopped"' in again.tail()
    assert not any(map(lives, left))


def test_the_help_of_a_keeper_says_how_it_is_upgraded(own_fleet: Fleet, tmp_path: Path) -> None:
    match = re.search(r"pkill -HUP (-f '[^']+')", HELP)
    assert match is not None
    script = Path(sys.executable).with_name("kvferry")
    command = [script, "keep", "--rest", "127.0.0.1:0", "--peer", "127.0.0.1:0", "--advertise", "127.0.0.1:9"]
    with subprocess.Popen([*command, "--engine-socket", str(tmp_path / "engine.sock")]) as keeper:
        try:
            eventually(lambda: psutil.Process(keeper.pid).children(), "it keeps a daemon")
            found = subprocess.run(f"pgrep {match[1]}", shell=True, capture_output=True, text=True, check=True).stdout
            ours = {each.pid for each in psutil.Process().children(recursive=True)}
            assert {int(pid) for pid in found.split()} & ours == {keeper.pid}
        finally:
            keeper.kill()


def test_a_keeper_does_not_wait_for_who_reads_its_lines() -> None:
    """Otherwise the next daemon would never start."""
    script = """if True:
        import sys
        from kvferryd.process.keeper import Keeper
        sys.executable = "/bin/true"  # its daemon
        keeper = Keeper([])
        for _ in range(999):
            keeper._report("." * 999)
        sys.exit(keeper.run())
    """
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as keeper:
        try:
            assert keeper.wait(TIMEOUT_S) == 0
        finally:
            keeper.kill()


@pytest.mark.slow
def test_a_daemon_that_never_served_is_not_started_again(own_fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag, value in (("--way", "sideways"), ("--rest", address)):
            daemon = own_fleet.daemon("wrong", kept=True, flags=[flag, value])
            assert daemon.process.wait(START_S) == 2
            assert value in daemon.tail()


@pytest.mark.slow
def test_a_daemon_that_served_before_its_keeper_had_looked_is_followed(
    own_fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that gets no time: the first daemon's word and its death come at once."""
    looks = tmp_path / "looks"
    os.mkfifo(looks)
    slow = f"from kvferryd.process.keeper import Keeper; keeper = Keeper(sys.argv[2:]); open({str(looks)!r}).read()"
    command = [sys.executable, "-c", f"import sys; {slow}; sys.exit(keeper.run())"]
    monkeypatch.setattr(fleet, "_kvferry", lambda arguments: [*command, *arguments])
    daemon = own_fleet.daemon("slow", kept=True)
    asyncio.run(own_fleet.ready(daemon, timeout_s=START_S))
    gone = kill(daemon, signal.SIGKILL)
    eventually(lambda: not lives(gone), "it is dead")
    looks.write_text("")
    eventually(lambda: serving(daemon) != gone, "another daemon serves")


def test_a_daemon_says_that_it_serves_when_its_keeper_has_been_told(tmp_path: Path) -> None:
    """A reader of the log that kills the daemon then kills one that has served."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    addresses = ["--rest", "127.0.0.1:0", "--peer", "127.0.0.1:0", "--advertise", "127.0.0.1:9"]
    with (tmp_path / "log").open("w") as log, ours, theirs:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "kvferryd", "serve", f"--keeper={theirs.fileno()}", *addresses,
             "--engine-socket", str(tmp_path / "engine.sock")],
            pass_fds=[theirs.fileno()], stdout=log, stderr=log,
        )  # fmt: skip
        theirs.close()
        while b"loaded" not in ours.recv(4096):
            continue
        ours.send(b'""')
        ours.shutdown(socket.SHUT_RD)
        daemon.wait(START_S)
    assert "serving" not in (tmp_path / "log").read_text(), "it could not tell its keeper"


@pytest.mark.slow
def test_an_upgrade_that_does_not_load_leaves_the_daemon_that_serves(
    own_fleet: Fleet, tmp_path: Path, request_id: str
) -> None:
    """And one that loads takes its place, with the settings of now."""
    settings = tmp_path / "kvferry.toml"
    settings.write_text("max_leases = 64\n")
    daemon = own_fleet.daemon("upgraded", kept=True, flags=["--config", str(settings)])
    asyncio.run(own_fleet.ready(daemon, timeout_s=START_S))
    engine = Engine(f"e-{request_id[-8:]}", daemon, "1")
    before = serving(daemon)

    settings.write_text("max_leases = many\n")
    daemon.signal(signal.SIGHUP)
    eventually(lambda: "the one that serves stays" in daemon.log.read_text(), "the keeper says that it does not load")
    assert serving(daemon) == before and engine.said.empty()

    settings.write_text("max_leases = 65\n")
    daemon.signal(signal.SIGHUP)
    eventually(lambda: serving(daemon) != before, "the new one serves")
    assert engine.attached.wait(TIMEOUT_S)
    assert "it was upgraded" in daemon.log.read_text()
    engine.client.close()


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter of daemons: a link, so that a test can take it away, as one who rebuilds a virtual environment
    does, and put another thing in its place."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (venv / "lib").symlink_to(Path(sys.prefix) / "lib")
    python = venv / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(python))
    return python


def test_a_daemon_that_cannot_be_started_is_tried_again_and_those_that_live_stay(
    own_fleet: Fleet, interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, {"kvferry.protocol.keeper.STANDBYS_APART_S": 0.5})
    daemon = own_fleet.daemon("rebuilt", kept=True)
    eventually(lambda: stands_by(daemon), "another daemon stands by")
    current, real = serving(daemon), interpreter.readlink()
    (standby,) = children(daemon) - {current}

    def says(what: str) -> None:
        eventually(lambda: daemon.process.poll() is not None or what in daemon.log.read_text(), f"it says: {what}")
        assert daemon.process.poll() is None and what in daemon.log.read_text()

    interpreter.unlink()
    daemon.signal(signal.SIGHUP)
    says("the one that serves stays")
    assert children(daemon) == {current, standby}

    os.kill(standby, signal.SIGKILL)
    says("the daemon that stood by is dead (it was ended by SIGKILL)")
    says("another one that stands by is tried again in 0.5 s")
    assert children(daemon) == {current}

    os.kill(current, signal.SIGKILL)
    says("nobody serves")
    interpreter.symlink_to(real)
    eventually(lambda: serving(daemon) != current, "another daemon serves")
    eventually(lambda: stands_by(daemon), "and yet another stands by")


@pytest.mark.slow
def test_a_daemon_that_hangs_before_it_stands_by_is_killed(
    own_fleet: Fleet, interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every further upgrade would wait for it, and nobody would follow the one that serves."""
    bounded(monkeypatch, {"kvferry.protocol.keeper.STANDBYS_APART_S": 0.5, "kvferry.protocol.keeper.LOADS_S": 8.0})
    daemon = own_fleet.daemon("hangs", kept=True)
    eventually(lambda: stands_by(daemon), "another daemon stands by")
    current, real = serving(daemon), interpreter.readlink()
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 3600\n")
    hangs.chmod(0o755)
    interpreter.unlink()
    interpreter.symlink_to(hangs)
    daemon.signal(signal.SIGHUP)
    eventually(lambda: "the one that serves stays" in daemon.log.read_text(), "the keeper gives it up")
    assert serving(daemon) == current

    def hung() -> list[int]:
        return [int(each) for each in re.findall(r"has not loaded within (\d+) s", daemon.log.read_text())]

    before = hung()  # the one that was to stand by may be among them: each has twice the time of the one before
    assert before[0] == 8
    os.kill(current, signal.SIGKILL)
    eventually(lambda: any(each >= 16 for each in hung()[len(before) :]), "nor does one that follows serve")
    interpreter.unlink()
    interpreter.symlink_to(real)
    eventually(lambda: serving(daemon) != current, "another daemon serves")


@pytest.mark.parametrize(
    "times",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_daemons_are_upgraded_from_the_commit_before_under_load(
    own_fleet: Fleet, tmp_path: Path, request_id: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    code = tmp_path / "code"
    code.symlink_to(before_this(tmp_path / "before"))
    monkeypatch.setenv("PYTHONPATH", path_of(code))
    daemons = [own_fleet.daemon(name, kept=True) for name in ("source", "reader")]
    asyncio.run(own_fleet.ready(*daemons, timeout_s=START_S))
    engines = [Engine(f"{daemon.name}-{request_id[-8:]}", daemon, "1") for daemon in daemons]
    load = Load(*engines)
    with load.running():
        load.more()
        for versions in (["now", "before"] * times)[: 2 * times - 1]:
            code.unlink()
            code.symlink_to(ROOT if versions == "now" else tmp_path / "before")
            for daemon in daemons:  # in turn: both versions meet
                old = serving(daemon)
                daemon.signal(signal.SIGHUP)
                eventually(lambda daemon=daemon, old=old: serving(daemon) != old, f"the daemon of {versions} serves")
                load.more()
    for engine in engines:
        engine.client.close()
