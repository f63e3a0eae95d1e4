"""`kvferry host` with the reference engine: what ends with what, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from launched import Launched, hosted, refused

from kvferry import ManifestBuilder, ModelInfo, Shard, SharedRegion
from kvferry.blocking import BlockingEngineClient
from kvferryd.demo.fleet import HOST, DaemonService, Fleet, _kvferry
from kvferryd.memory.host import NAME
from kvferryd.run.daemons import APART

START_S = 240.0


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fleet = Fleet()
    monkeypatch.setenv("TMPDIR", str(fleet.directory))
    yield fleet
    fleet.close()


def leaves_nothing(host: Launched) -> None:
    host.leaves_nothing()
    assert not [*host.fleet.directory.glob("kvferry-host-*")], "its own folder"


def status(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = _kvferry(["status", "--host", str(folder), *flags])
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def daemon_of(host: Launched, number: int, folder: Path) -> DaemonService:
    """As the fleet's engines find one."""
    service = host.service
    socket = folder / f"cpu-{number}.sock"
    return DaemonService("daemon", service.url, "", service.process, service.log, peer="", socket=socket)


def test_ranks_of_an_engine_find_each_other_and_hand_over(fleet: Fleet) -> None:
    folder = fleet.directory / "f"
    host = hosted(fleet, folder, 4)
    host.says("all daemons serve")
    idle = status(folder)
    assert (idle.returncode, idle.stdout.count("idle")) == (0, 4), idle
    prefill = fleet.engine("p", tp=2, preset="tiny", daemons=[daemon_of(host, each, folder) for each in (1, 2)])
    decode = fleet.engine("d", preset="tiny", daemons=[daemon_of(host, 3, folder)])
    asyncio.run(fleet.ready(prefill, decode, timeout_s=START_S))
    proxy = fleet.proxy(prefill, decode)
    asyncio.run(fleet.ready(proxy, timeout_s=START_S))

    def done() -> list[str]:
        """Ends of the transfers, now that one more request has been computed."""
        body = {"prompt": [*range(3, 60)], "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
        moved, alone = (
            httpx.post(f"{each.url}/v1/completions", json=body, trust_env=False, timeout=60).json()
            for each in (proxy, prefill)
        )
        assert moved["choices"] == alone["choices"]
        url = f"http://{HOST}:{host.rest + 3 * APART}/v1/transfers"
        return [each["state"] for each in httpx.get(url, trust_env=False).json()["transfers"]]

    assert done() == ["done"]
    busy = status(folder, "--json")
    assert busy.returncode == 0, busy
    found = json.loads(busy.stdout)["daemons"]
    engines = [[(engine["engine_id"], engine["rank"]) for engine in each["engines"]] for each in found]
    assert engines == [[], [("p", 0)], [("p", 1)], [("d", 0)]]
    host.look()
    host.serving(0).kill()  # which introduces the ranks to each other
    host.eventually(lambda: len(host.served(0)) == 2, "another one introduces them")
    host.eventually(lambda: status(folder).returncode == 0, "the ranks have joined again")
    assert done() == ["done", "done"]
    host.look()
    for service in (proxy, decode, prefill):
        service.process.terminate()
        service.process.wait(60)
        fleet.services.remove(service)
    host.service.process.send_signal(signal.SIGHUP)  # as of a closed terminal
    assert host.wait() == 0
    leaves_nothing(host)


def caches(daemon: psutil.Process) -> int:
    """The regions of host memory that it holds for engines."""
    return Path(f"/proc/{daemon.pid}/maps").read_text().count(NAME)


@contextmanager
def attached(socket: Path) -> Iterator[queue.Queue[str]]:
    """An engine in host memory at this daemon; gives what it is told about the daemon."""
    said: queue.Queue[str] = queue.Queue()
    epoch = uuid.uuid4().hex
    client = BlockingEngineClient.connect(str(socket), engine_id="e", epoch=epoch, timeout_s=60, say=said.put)
    try:
        region = client.allocate(1 << 16)
        assert isinstance(region, SharedRegion)
        cache = region.array().view(np.float32)[:512].reshape(8, 4, 2, 8)
        builder = ManifestBuilder("e", epoch, ModelInfo(name="m", fingerprint="f"))
        builder.region(0, "host", nbytes=region.nbytes, address=region.address)
        builder.group("full", num_blocks=8, block_size=4)
        heads = Shard(axis="head", start=0, total=2)
        builder.component("full", layer=0, name="k", array=cache, axes=("block", "slot", "head", "dim"), shard=heads)
        client.register(builder.build())
        yield said
    finally:
        client.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Launched]:
    """A host of two daemons, for the tests after which all of it serves as before."""
    with pytest.MonkeyPatch.context() as inherited, contextlib.closing(Fleet()) as fleet:
        inherited.setenv("TMPDIR", str(fleet.directory))
        host = hosted(fleet, fleet.directory / "f", 2)
        host.says("all daemons serve")
        host.look()
        yield host
        host.look()
        host.service.process.terminate()
        assert host.wait() == 0
        leaves_nothing(host)


@pytest.mark.parametrize("which", ["daemon", "keeper"])
def test_what_dies_is_started_again_and_its_engine_attaches(shared: Launched, which: str) -> None:
    host, folder = shared, shared.fleet.directory / "f"
    before = [len(host.served(number)) for number in range(2)]
    with attached(folder / "cpu-1.sock") as said:
        (host.serving(1) if which == "daemon" else host.child("daemon-1")).kill()
        host.eventually(lambda: len(host.served(1)) == before[1] + 1, "another daemon serves")
        while "there again" not in said.get(timeout=60):
            pass
        host.look()
        assert len(host.served(0)) == before[0], "the other one has nothing of it"
        found = json.loads(status(folder, "--json").stdout)["daemons"]
        assert [each["ready"]["ready"] for each in found] == [False, True]


def test_an_engine_that_is_killed_leaves_its_daemon_to_the_next_one(shared: Launched) -> None:
    host, fleet, folder = shared, shared.fleet, shared.fleet.directory / "f"
    daemon, before = daemon_of(host, 0, folder), host.served()
    killed = fleet.engine("e", preset="tiny", daemons=[daemon])
    asyncio.run(fleet.ready(killed, timeout_s=START_S))
    assert status(folder).stdout.count("idle") == 1
    killed.process.kill()
    killed.process.wait(60)
    fleet.services.remove(killed)
    host.eventually(lambda: status(folder).stdout.count("idle") == 2, "its cache is given up")
    assert caches(host.serving()) == 0
    with attached(folder / "cpu-0.sock"):
        assert caches(host.serving()) == 1
    assert host.served() == before, "no daemon has died with it"


def test_what_is_in_the_way_is_said_before_anything_starts(shared: Launched) -> None:
    host, folder = shared, shared.fleet.directory / "f"
    said = refused(
        ["--cpu=2", f"--folder={folder}", f"--rest={HOST}:{host.rest}", f"--peer={HOST}:{host.peer}"], "host"
    )
    assert f"daemon-0: nothing can listen on rest = {HOST}:{host.rest}" in said
    assert status(folder).returncode == 0, "the one that runs keeps its records"
    assert "no `kvferry host` runs with this folder" in status(folder / "nowhere").stderr


def test_no_process_of_it_is_in_another_ones_group(shared: Launched) -> None:
    """A terminal's Ctrl-C goes to the first one alone, which hands it on."""
    groups = {os.getpgid(process.pid) for process in shared.first.children(recursive=True)}
    assert os.getpgid(shared.first.pid) not in groups
    assert psutil.pid_exists(shared.first.pid)


ENDS = {"first": (lambda host: host.first, -signal.SIGKILL), "second": (lambda host: host.second, 128 + signal.SIGKILL)}


@pytest.mark.parametrize("which", ENDS)
def test_when_it_is_killed_itself_nothing_is_left(fleet: Fleet, which: str) -> None:
    find, code = ENDS[which]
    host = hosted(fleet, fleet.directory / "f", 2)
    host.says("all daemons serve")
    host.look()
    find(host).kill()
    assert host.wait() == code
    leaves_nothing(host)


@pytest.mark.usefixtures("none_serves")
def test_a_daemon_that_ends_before_all_have_served_ends_the_host(fleet: Fleet) -> None:
    host = hosted(fleet, fleet.directory / "f", 2)
    keeper = host.child("daemon-1")
    host.look()
    keeper.kill()
    assert host.wait() == 2
    assert "daemon-1 was ended by SIGKILL before it served: its lines say why" in host.said
    assert "Traceback" not in host.said
    leaves_nothing(host)


def test_a_place_has_one_host(fleet: Fleet) -> None:
    folder = fleet.directory / "f"
    both = hosted(fleet, folder, 1), hosted(fleet, folder, 1)  # at one time, with ports of their own
    both[0].eventually(lambda: any(each.service.process.poll() is not None for each in both), "one of them ends")
    stays, ended = sorted(both, key=lambda each: each.service.process.poll() is not None)
    assert (ended.wait(), stays.service.process.poll()) == (2, None)
    assert "another kvferry host has the place of cpu-0 (--folder = " in ended.said
    stays.says("all daemons serve")
    with attached(folder / "cpu-0.sock"):
        assert status(folder).returncode == 0, "its socket and its record stay"
    stays.look()
    stays.service.process.terminate()
    assert stays.wait() == 0
    leaves_nothing(stays)
