"""Real SGLang engines on the CPU, each rank with a daemon, behind the real sglang-router, and what to ask of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import ANSWER_S, HOST, SITE, Engines, leases_at, transfers_at
from kvferry.schemas import LeaseRecord, TransferRecord
from kvferryd.demo.fleet import DaemonService, Service, ServiceError

PYTHON = Path(__file__).parents[2] / os.environ.get("SGLANG_VENV", ".venv-sglang") / "bin" / "python"
START_S = 420.0
ROOMS = itertools.count(1)
FLAGS = (
    "--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--max-total-tokens", "16384", "--max-running-requests", "16", "--chunked-prefill-size", "512",
    "--disable-overlap-schedule", "--skip-tokenizer-init", "--skip-server-warmup", "--disable-cuda-graph",
)  # fmt: skip
"""Of every engine."""


class SglangFleet(Engines):
    """A Fleet that also starts SGLang and its router, from a virtual environment of their own."""

    def sglang(
        self,
        name: str,
        model: Path,
        daemons: Sequence[DaemonService] = (),
        *,
        mode: str = "null",
        ranks: int = 1,
        page_size: int = 32,
        backend: str = "kvferry",
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> SglangEngine:
        """mode: prefill, decode, or null for an engine that stands alone."""
        port, bootstrap = self.free_port(), self.free_port()
        command = [
            "/usr/bin/env", f"PYTHONPATH={os.pathsep.join(filter(None, (str(SITE), os.environ.get('PYTHONPATH'))))}",
            f"KVFERRY_SGLANG_SOCKET={self.directory / f'{name}-{{rank}}.sock'}", f"KVFERRY_SGLANG_ENGINE_ID={name}",
            "SGLANG_USE_CPU_ENGINE=1", "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0",
            *(f"{key}={value}" for key, value in (environment or {}).items()),
            str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "m",
            "--host", HOST, "--port", str(port), "--random-seed", "0", "--page-size", str(page_size),
            "--tp", str(ranks), "--nccl-port", str(self.free_port()), *FLAGS, *flags,
        ]  # fmt: skip
        if mode != "null":
            command += ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", backend]
            command += ["--disaggregation-bootstrap-port", str(bootstrap)]
        if mode == "decode":
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        process, log = self._start(f"sglang-{name}", command)
        engine = SglangEngine(f"sglang {name}", f"http://{HOST}:{port}", "/health", process, log, bootstrap=bootstrap)
        return self._add(engine)

    def router(self, prefill: Sequence[SglangEngine], decode: Sequence[SglangEngine]) -> Service:
        """sglang-router before them."""
        port = self.free_port()
        command = [
            str(PYTHON), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", HOST, "--policy",
            "round_robin", "--port", str(port), "--prometheus-port", str(self.free_port()), "--disable-retries",
        ]  # fmt: skip
        for engine in prefill:
            command += ["--prefill", engine.url, str(engine.bootstrap)]
        for engine in decode:
            command += ["--decode", engine.url]
        process, log = self._start("sglang-router", command)
        return self._add(Service("sglang-router", f"http://{HOST}:{port}", "/readiness", process, log))


@dataclass(frozen=True, slots=True, eq=False)
class SglangEngine(Service):
    """bootstrap: the port at which decode finds prefill."""

    bootstrap: int


@dataclass
class SglangPair:
    """A prefill and a decode engine, a router before them, and perhaps an engine that stands alone."""

    fleet: SglangFleet
    engines: dict[str, SglangEngine]
    daemons: dict[str, list[DaemonService]]
    router: Service

    def room(self) -> dict[str, Any]:
        """What a router adds to a request, for tests that send the two legs themselves."""
        return {"bootstrap_host": HOST, "bootstrap_port": self.engines["p"].bootstrap, "bootstrap_room": next(ROOMS)}

    def leases(self) -> list[LeaseRecord]:
        return leases_at(self.daemons["p"][0])

    def transfers(self) -> list[TransferRecord]:
        """On rank 0 of decode, the oldest first."""
        return transfers_at(self.daemons["d"][0])


@contextmanager
def sglang_pair(
    model: Any, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, alone: bool = True,
    backend: str = "kvferry", daemon_flags: Sequence[str] = (),
) -> Iterator[SglangPair]:  # fmt: skip
    """prefill, decode: for `SglangFleet.sglang`. backend: or nixl, SGLang's own. Raises ServiceError."""
    if not PYTHON.exists():
        pytest.skip("there is no SGLang here: make engines-sglang installs one")
    fleet = SglangFleet()
    try:
        sides = {"p": {"mode": "prefill"} | (prefill or {}), "d": {"mode": "decode"} | (decode or {})}
        daemons = {
            name: fleet.daemons(name, side.get("ranks", 1), flags=daemon_flags)
            for name, side in sides.items()
            if backend == "kvferry"
        }
        asyncio.run(fleet.ready(*chain.from_iterable(daemons.values()), timeout_s=START_S))
        folder = fleet.model(model)
        engines = {name: fleet.sglang(name, folder, backend=backend, **side) for name, side in sides.items()}
        if alone:
            engines["alone"] = fleet.sglang("alone", folder)
        asyncio.run(fleet.ready(*engines.values(), timeout_s=START_S))
        router = fleet.router([engines["p"]], [engines["d"]])
        asyncio.run(fleet.ready(router, timeout_s=START_S))
        yield SglangPair(fleet, engines, daemons, router)
    except ServiceError as error:  # its log goes with the fleet
        error.add_note(error.service.tail(40))
        raise
    finally:
        fleet.close()


def generate(
    engine: Service, tokens: Sequence[int], *, max_tokens: int = 16, timeout_s: float = ANSWER_S, **more: Any
) -> httpx.Response:
    parameters = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": parameters} | more
    with httpx.Client(trust_env=False, timeout=timeout_s) as http:
        return http.post(f"{engine.url}/generate", json=body)


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    body = response.json()
    return list((body[0] if isinstance(body, list) else body)["output_ids"])


def streamed(engine: Service, tokens: Sequence[int], max_tokens: int = 16) -> list[int]:
    """The tokens of a streamed answer: SGLang sends them from the first on, or the new ones."""
    parameters = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": parameters, "stream": True}
    events = []
    with (
        httpx.Client(trust_env=False, timeout=ANSWER_S) as http,
        http.stream("POST", f"{engine.url}/generate", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line.removeprefix("data: ")))
    assert len(events) > 1, "the answer came in one piece"
    return list(events[-1]["output_ids"])


def same(pair: SglangPair, prompts: Sequence[Sequence[int]], at_once: int = 1) -> None:
    """Assert that every prompt's tokens are those of one engine."""
    with ThreadPoolExecutor(at_once) as pool:
        moved = list(pool.map(lambda tokens: tokens_of(generate(pair.router, tokens)), prompts))
    alone = [tokens_of(generate(pair.engines["alone"], tokens)) for tokens in prompts]
    different = [len(tokens) for tokens, one, other in zip(prompts, moved, alone, strict=True) if one != other]
    assert not different, f"prompts of {different} tokens have other tokens: {moved}, alone {alone}"
