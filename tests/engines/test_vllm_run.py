"""`kvferry run -- vllm ...`: a pair of two commands, and what becomes of it when one of its processes is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from launched import Launched, launched

from engines import PYTHON, SITE, START_S, Engines, Pair, complete, fleet_of, prompt, transfers_at
from kvferryd.demo.fleet import HOST, DaemonService

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture
def fleet() -> Iterator[Engines]:
    with fleet_of(Engines) as fleet:
        yield fleet


def vllm(fleet: Engines, ranks: int) -> Launched:
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    command = [
        "/usr/bin/env", f"PYTHONPATH={path}", str(PYTHON), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(fleet.directory / "model"), "--served-model-name", "m", "--host", HOST, "--port", "{port}",
        "--seed", "0", "--skip-tokenizer-init", "--block-size", "32", *Engines.flags, "-tp", str(ranks),
    ]  # fmt: skip
    return launched(fleet, command, ranks=ranks)


def ready(fleet: Engines, *runs: Launched) -> None:
    asyncio.run(fleet.ready(*(run.service for run in runs), timeout_s=START_S))


def daemon(run: Launched) -> DaemonService:
    """Rank 0's, to be asked over REST."""
    service = run.service
    url = f"http://{HOST}:{run.rest}"
    return DaemonService("daemon-0", url, "/healthz", service.process, service.log, peer="", socket=Path())


def a_pair_of_two_commands(fleet: Engines, ranks: int) -> None:
    fleet.model()
    prefill, decode = vllm(fleet, ranks), vllm(fleet, 1)
    ready(fleet, prefill, decode)
    pair = Pair(fleet, prefill.service, decode.service, [daemon(prefill)], [daemon(decode)])
    for length in (5, 100, 700):
        assert pair.handover(prompt(length)) == pair.alone(prompt(length))
    assert [each.state for each in transfers_at(daemon(decode))] == ["done"] * 3

    decode.serving().kill()
    decode.eventually(lambda: decode.said.count("engine registered") == 2, "vLLM attaches to the next daemon")
    assert pair.handover(prompt(300)) == pair.alone(prompt(300))

    prefill.look()
    decode.look()
    decode.first.kill()
    assert decode.wait() == -signal.SIGKILL
    decode.leaves_nothing()
    prefill.service.process.send_signal(signal.SIGTERM)
    status = prefill.wait()
    assert f"the engine ended with status {status}" in prefill.said
    # vLLM 0.32 asks for the command line of a process that has its port, and may have ended (launcher.py:302).
    assert status == 0 or "psutil.ZombieProcess" in prefill.said
    prefill.leaves_nothing()


def test_a_pair_of_two_commands_hands_over_and_leaves_nothing(fleet: Engines) -> None:
    a_pair_of_two_commands(fleet, ranks=1)


@pytest.mark.long
def test_a_pair_of_which_one_has_two_ranks_does_so_too(fleet: Engines) -> None:
    a_pair_of_two_commands(fleet, ranks=2)


def worker(run: Launched) -> int:
    """The youngest of the engine's processes."""
    return max(run.child("engine").children(recursive=True), key=lambda each: each.create_time()).pid


KILLED: dict[str, tuple[Callable[[Launched], int], set[int]]] = {
    "keeper": (lambda run: run.child("daemon-1").pid, {2}),
    "engine": (lambda run: run.child("engine").pid, {128 + signal.SIGKILL}),
    "worker": (worker, {0, 1, 128 + signal.SIGKILL}),  # vLLM's own
    "first": (lambda run: run.first.pid, {-signal.SIGKILL}),
    "second": (lambda run: run.second.pid, {128 + signal.SIGKILL}),
}


@pytest.mark.long
@pytest.mark.parametrize("which", KILLED)
def test_whichever_process_is_killed_nothing_is_left(fleet: Engines, which: str) -> None:
    find, statuses = KILLED[which]
    fleet.model()
    run = vllm(fleet, 2)
    ready(fleet, run)
    assert complete(run.service, prompt(100)).status_code == 200
    run.look()
    os.kill(find(run), signal.SIGKILL)
    assert run.wait() in statuses
    run.leaves_nothing()
