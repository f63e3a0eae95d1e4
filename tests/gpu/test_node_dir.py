"""Daemons that share a folder: GPU memory goes between them by descriptors, with no namespace in common.

On two GPUs: `pytest -s tests/gpu/test_node_dir.py` prints a line: a pair in pods of their own, and the same pair in one
namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from needs import GPUS

# isort: split
import torch
from fleet import peer_stub
from gpu_engine import GpuEngine
from pod_engine import record_of
from pods import Pod, pods
from ranks import HND, Shape
from test_staged import BIG, MANY
from test_staged import moved as staged
from test_vmm import FAR, end, engine_on, moved

from kvferry.blocking import BlockingEngineClient
from kvferry.memory import CudaRegion
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
WAIT_S, REPEATS = 60.0, 5


@pytest.fixture(scope="module")
async def near(fleet: Fleet) -> DaemonService:
    return await sharing(fleet, "sharing-near", 0)


@pytest.fixture(scope="module")
async def far(fleet: Fleet) -> DaemonService:
    return await sharing(fleet, "sharing-far", FAR)


async def sharing(fleet: Fleet, name: str, gpu: int, *flags: str) -> DaemonService:
    folder = fleet.directory / "node"
    folder.mkdir(exist_ok=True)
    started = fleet.daemon(name, flags=["--device", f"cuda:{gpu}", "--node-dir", str(folder), *flags])
    await fleet.ready(started, timeout_s=WAIT_S)
    return started


@pytest.mark.parametrize("adopted", [False, True], ids=["of the daemon", "of the engine, several allocations"])
async def test_memory_that_has_descriptors_is_mapped(near: DaemonService, far: DaemonService, adopted: bool) -> None:
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND), adopted=False)
    if adopted:
        source, memory = await engine_on(near, 0, Shape(num_blocks=512))
        await moved(source, destination, ("mapped",))
        await destination.close()
        await end(source, memory)
    else:
        source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
        await moved(source, destination, ("mapped",))
        await destination.close()
        await source.close()


STAGED = ("--way", "staged"), ("--strict", "--ucx", "TLS=all")
"""Flags of daemons that read slots."""


@pytest.mark.parametrize("flags", STAGED, ids=["staged", "strict"])
async def test_slots_are_handed_over_as_regions_are(own_fleet: Fleet, flags: tuple[str, ...]) -> None:
    near, far = [
        await sharing(own_fleet, name, gpu, "--arena-mb", "1", *flags)
        for name, gpu in (("slots-s", 0), ("slots-r", FAR))
    ]
    source = await GpuEngine.on("source", [near], [0], BIG, adopted=False)
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND, num_blocks=640), adopted=False)
    for tokens in (1, 300, MANY):
        assert (await staged(source, destination, tokens)).transport == "cuda_ipc"
    async with peer_stub(near) as stub:
        mapping = stub.Map(peer_pb2.MapRequest(engine_id=source.engine_id, epoch=source.epoch))
        slots = (await mapping.read()).slots
        assert "node_dir" in slots.refusal and not slots.HasField("shared") and not slots.HasField("allocation")
        mapping.cancel()
    await destination.close()
    await source.close()


async def test_a_reader_without_the_folder_says_so_and_reads_otherwise(near: DaemonService, fleet: Fleet) -> None:
    outside = fleet.daemon("outside", flags=["--device", f"cuda:{FAR}"])
    await fleet.ready(outside, timeout_s=WAIT_S)
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
    destination = await GpuEngine.on("destination", [outside], [FAR], Shape(axes=HND), adopted=False)
    ways = await moved(source, destination, ("staged", "direct"))
    assert "node_dir" in ways["mapped"] and "reader" in ways["mapped"]
    await destination.close()
    await source.close()


def test_the_next_daemon_is_given_the_memory_without_a_keeper(own_fleet: Fleet) -> None:
    daemon, said = asyncio.run(sharing(own_fleet, "alone", 0)), queue.Queue[str]()
    with BlockingEngineClient.connect(
        str(daemon.socket), engine_id="e", epoch=uuid.uuid4().hex, timeout_s=WAIT_S, say=said.put
    ) as client:
        region = client.allocate(32 << 20)
        assert isinstance(region, CudaRegion) and region.outlives_daemon
        tensor = region.tensor()
        tensor.fill_(0x5A)
        torch.cuda.synchronize()
        daemon.signal(signal.SIGKILL)
        daemon.process.wait(WAIT_S)
        asyncio.run(own_fleet.ready(own_fleet.again(daemon), timeout_s=WAIT_S))
        while "there again" not in (line := said.get(timeout=WAIT_S)):
            assert "start the engine again" not in line
        assert bool((tensor == 0x5A).all())
        del tensor
        region.close()


def test_memory_that_nobody_holds_is_freed(own_fleet: Fleet) -> None:
    daemon, nbytes, gpu = asyncio.run(sharing(own_fleet, "freed", 0)), 4 << 30, GPUS[0]
    for count in range(2):  # the first time all processes make their contexts
        before = gpu.memory()[0]
        with BlockingEngineClient.connect(
            str(daemon.socket), engine_id="e", epoch=str(count), timeout_s=WAIT_S
        ) as client:
            region = client.allocate(nbytes)
            assert before - gpu.memory()[0] > nbytes // 2
            region.close()
    assert gpu.memory()[0] >= before - (64 << 20)


class Process:
    """An engine that sees one GPU, which is told what to do by lines."""

    def __init__(self, pod: Pod | None, socket: Path, role: str, gpu: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("pod_engine.py")), str(socket), role]
        command = ["env", f"CUDA_VISIBLE_DEVICES={GPUS[gpu].uuid}", *command]
        if pod:
            command = pod.command(command, [node for at, node in enumerate(device_nodes()) if at != gpu])
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, what: str, **more: object) -> Any:
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"do": what, **more}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            self._process.stdout.close()


def device_nodes() -> list[str]:
    """The nodes of all GPUs, in the order of their numbers."""
    return sorted(str(node) for node in Path("/dev").glob("nvidia[0-9]*"))


Tell = Callable[[str], dict[str, Any]]
"""The record of a transfer, by its id."""


@contextlib.contextmanager
def served(command: Sequence[str], log: Path, pod: Pod | None, *urls: str) -> Iterator[None]:
    """Daemons, until all answer at these URLs, and their log where something fails."""
    with log.open("wb") as output:
        process = subprocess.Popen(pod.command(command) if pod else command, stdout=output, stderr=output)
    try:
        for url in urls:
            ask = [sys.executable, "-c", UP, url]
            subprocess.run(pod.command(ask) if pod else ask, timeout=WAIT_S, check=True)
        yield
    except BaseException as error:
        error.add_note(f"{log.name}: {log.read_text()[-5000:]}")
        raise
    finally:
        process.terminate()
        process.wait(WAIT_S)


UP = """
import sys, time, httpx
while True:
    try:
        if httpx.get(sys.argv[1] + "/healthz", timeout=2, trust_env=False).status_code == 200:
            break
    except httpx.HTTPError:
        pass
    time.sleep(0.2)
"""
"""Bounded by its caller."""


@contextlib.contextmanager
def pair(
    fleet: Fleet, places: tuple[Pod, Pod] | tuple[None, None], *flags: str
) -> Iterator[tuple[Process, Process, Tell]]:
    """A source on the first GPU and a reader on the last, each with its daemon, in these pods or here."""
    folder, secret, engines, rests = fleet.directory / "node", fleet.directory / "secret", [], []
    folder.mkdir(exist_ok=True)
    secret.write_text(secrets.token_hex(32))
    with contextlib.ExitStack() as undo:
        for role, place, gpu in zip(("source", "reader"), places, (0, FAR), strict=True):
            address = place.address if place else "127.0.0.1"
            rest, peer = (f"{address}:{fleet.free_port()}" for _ in range(2))
            socket = fleet.directory / f"{role}-{'apart' if place else 'here'}.sock"
            command = [
                sys.executable, "-m", "kvferryd", "serve", "--device", f"cuda:{gpu}", "--rest", rest, "--peer", peer,
                "--roster", peer, "--engine-socket", str(socket), "--drain-timeout-s", "0", *flags,
            ]  # fmt: skip
            if place:
                command += ["--peer-secret-file", str(secret), "--allow-peers", "10.77.1.0/24"]
                command += ["--node-dir", str(folder)]
            undo.enter_context(served(command, socket.with_suffix(".log"), place, f"http://{rest}"))
            engines.append(undo.enter_context(contextlib.closing(Process(place, socket, role, gpu))))
            rests.append(f"http://{rest}")
        source, reader = engines
        yield source, reader, lambda done: reader.do("record", rest=rests[1], transfer_id=done)


def rates(source: Process, reader: Process, tell: Tell, way: str = "mapped") -> tuple[dict[str, Any], float]:
    """The last record, and GB/s while bytes moved: the median of several requests, one after the other; the first of
    all and the last are compared word by word."""
    address, found = source.do("tell")["address"], []
    for count in (1, 1 + REPEATS):
        request_ids = [uuid.uuid4().hex for _ in range(count)]
        for request_id in request_ids:
            source.do("publish", request_id=request_id)
        found += [tell(each) for each in reader.do("receive", request_ids=request_ids, address=address)]
    assert {(each["path"], each["transport"]) for each in found} == {(way, "cuda_ipc")}, found[-1]["ways"]
    return found[-1], statistics.median(each["bytes_per_s"] for each in found[2:]) / 1e9


def seen(*engines: Process) -> list[list[str]]:
    return [engine.do("tell")["gpus"] for engine in engines]


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_nvlink_between_pods(own_fleet: Fleet) -> None:
    with pair(own_fleet, (None, None)) as engines:
        _, here = rates(*engines)
    with pods() as places, pair(own_fleet, places) as engines:
        assert seen(*engines[:2]) == [[GPUS[0].uuid], [GPUS[FAR].uuid]]
        record, apart = rates(*engines)
    print(f"mapped, 671 MB: {apart:.0f} GB/s between pods, {here:.0f} in one namespace; {record['phases_ms']}")


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", STAGED, ids=["staged", "strict"])
def test_slots_are_read_over_nvlink_between_pods(own_fleet: Fleet, flags: tuple[str, ...]) -> None:
    with pair(own_fleet, (None, None), *flags) as engines:
        _, here = rates(*engines, way="staged")
    with pods() as places, pair(own_fleet, places, *flags) as engines:
        assert seen(*engines[:2]) == [[GPUS[0].uuid], [GPUS[FAR].uuid]]
        record, apart = rates(*engines, way="staged")
    print(f"staged, 671 MB: {apart:.0f} GB/s between pods, {here:.0f} in one namespace; {record['phases_ms']}")


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_daemons_of_a_host_serve_engines_of_several_pods(own_fleet: Fleet) -> None:
    port = own_fleet.free_port()
    rests = [f"http://127.0.0.1:{port + 10 * gpu}" for gpu in (0, FAR)]
    with contextlib.ExitStack() as undo:
        # A socket's path, with a UUID in it, has at most 104 bytes.
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        command = [
            sys.executable, "-m", "kvferryd", "host", "--folder", str(folder), "--gpus", f"0,{FAR}",
            "--rest", f"127.0.0.1:{port}", "--peer", f"127.0.0.1:{own_fleet.free_port()}", "--drain-timeout-s", "0",
        ]  # fmt: skip
        undo.enter_context(served(command, folder / "host.log", None, *rests))
        source, reader = (
            undo.enter_context(contextlib.closing(Process(place, folder / f"{GPUS[gpu].uuid}.sock", role, gpu)))
            for place, role, gpu in zip(undo.enter_context(pods()), ("source", "reader"), (0, FAR), strict=True)
        )
        assert seen(source, reader) == [[GPUS[0].uuid], [GPUS[FAR].uuid]]
        _, rate = rates(source, reader, lambda done: asyncio.run(record_of(rests[1], done)))
    print(f"mapped, 671 MB: {rate:.0f} GB/s between engines of two pods, by the daemons of their host")
