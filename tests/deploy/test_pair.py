"""deploy/pair's engine, with the settings of a pod: bytes over TCP, and no port outside of the range."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvferryd.demo.fleet import Fleet

ENGINE = Path(__file__).parents[2] / "deploy" / "pair" / "engine.py"
TIMEOUT_S = 60.0
UCX_PORTS = range(17411, 17475)


@contextlib.contextmanager
def daemon(folder: Path, fleet: Fleet) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str], int, int]]:
    """(process, variables of its engine, REST port, peer port)."""
    folder.mkdir()
    rest, peer = fleet.free_port(), fleet.free_port()
    variables = {
        "KVFERRY_REST": f"127.0.0.1:{rest}",
        "KVFERRY_PEER": f"127.0.0.1:{peer}",
        "KVFERRY_ENGINE_SOCKET": str(folder / "engine.sock"),
        # As between two pods: neither memory of another process nor anything but TCP.
        "KVFERRY_UCX": f"TLS=tcp,self TCP_PORT_RANGE={UCX_PORTS[0]}-{UCX_PORTS[-1]}",
    }
    command = [sys.executable, "-m", "kvferryd", "serve"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=log)
    try:
        yield process, {**os.environ, "ENGINE_SOCKET": variables["KVFERRY_ENGINE_SOCKET"]}, rest, peer
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()


def listening(process: subprocess.Popen[bytes]) -> set[int]:
    """The TCP ports that a process listens on."""
    connections = psutil.Process(process.pid).net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.timeout(180)
def test_a_request_moves_over_the_ports_that_the_network_policy_opens(tmp_path: Path, own_fleet: Fleet) -> None:
    with contextlib.ExitStack() as stack:
        source, prefill_env, rest, peer = stack.enter_context(daemon(tmp_path / "prefill", own_fleet))
        _, decode_env, _, _ = stack.enter_context(daemon(tmp_path / "decode", own_fleet))
        prefill = subprocess.Popen(
            [sys.executable, str(ENGINE), "prefill", "r"], env=prefill_env, stdout=subprocess.PIPE
        )
        stack.callback(prefill.wait)
        stack.callback(prefill.kill)
        assert prefill.stdout is not None
        assert prefill.stdout.readline().startswith(b"published"), (tmp_path / "prefill" / "log").read_text()
        ucx = listening(source) - {rest, peer}
        order = [sys.executable, str(ENGINE), "decode", "r", f"127.0.0.1:{peer}"]
        decode = subprocess.run(order, env=decode_env, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert decode.returncode == 0, decode.stderr + (tmp_path / "decode" / "log").read_text()
        assert "every byte is right" in decode.stdout
        assert prefill.wait(TIMEOUT_S) == 0
        assert ucx, "UCX does not listen at all: this test shows nothing"
        assert ucx <= set(UCX_PORTS), f"UCX listens outside of its range: {ucx}"


@pytest.mark.timeout(60)
def test_a_daemon_without_an_engine_is_alive_and_not_ready(tmp_path: Path, own_fleet: Fleet) -> None:
    """Why a startup probe asks /healthz: the engine is started after it has succeeded."""
    with daemon(tmp_path / "alone", own_fleet) as (_, _, rest, _):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                alive = httpx.get(f"http://127.0.0.1:{rest}/healthz")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the daemon does not come up"
                time.sleep(0.05)
        assert alive.status_code == 200
        assert httpx.get(f"http://127.0.0.1:{rest}/readyz").status_code == 503
