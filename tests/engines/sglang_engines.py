"""Real SGLang engines on the CPU, each rank with a daemon, behind the real sglang-router, and what to ask of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar

import httpx

import engines
from engines import ANSWER_S, HOST, SITE, Engines, events_of, fleet_of, leases_at, told_by, transfers_at
from kvferry.reference.config import ModelConfig
from kvferry.schemas import LeaseRecord, TransferRecord
from kvferryd.demo.fleet import DaemonService, Service

PYTHON = Path(__file__).parents[2] / os.environ.get("SGLANG_VENV", ".venv-sglang") / "bin" / "python"
START_S = 1500.0
DAEMON_S = 300.0
ROOMS = itertools.count(1)
FLAGS = (
    "--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--max-total-tokens", "16384", "--max-running-requests", "16", "--chunked-prefill-size", "512",
    "--disable-overlap-schedule", "--skip-tokenizer-init", "--skip-server-warmup", "--disable-cuda-graph",
    "--sleep-on-idle",
)  # fmt: skip
"""The options of every engine."""


class SglangFleet(Engines):
    """A Fleet that also starts SGLang and its router, from a virtual environment of their own."""

    sglang_flags: ClassVar[Sequence[str]] = FLAGS

    def sglang_environment(self, backend: str, ranks: int) -> dict[str, str]:
        """The variables of an engine with so many ranks, all stages or DP ranks counted."""
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "nixl_on_host" if backend == "nixl" else "few_models",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * ranks),
        }

    def sglang(
        self,
        name: str,
        *,
        mode: str,
        ranks: int = 1,
        stages: int = 1,
        dp: int = 1,
        page_size: int = 32,
        backend: str = "kvferry",
        bootstrap: int | None = None,
        flags: Sequence[str] = (),
        gpu: str = "",
    ) -> SglangEngine:
        """Start an engine of `model` and, where kvferry is the backend, a daemon for each of its ranks; with several
        DP ranks, for each of theirs.

        ranks: of each stage of a pipeline, or of each DP rank. mode: prefill, decode, or null, alone. bootstrap: the
        port of another engine, which has ended. gpu: of an engine of one rank, and of its daemon. Raises ServiceError.
        """
        ours = backend == "kvferry" and mode != "null"
        daemons = [
            each
            for dp_rank in range(dp if ours else 0)
            for each in self.daemons(f"{name}-{dp_rank}", ranks * stages, devices=[f"cuda:{gpu}"] if gpu else ())
        ]
        asyncio.run(self.ready(*daemons, timeout_s=DAEMON_S))
        port, bootstrap = self.free_port(), bootstrap or self.free_port()
        command = [
            "/usr/bin/env", *([f"CUDA_VISIBLE_DEVICES={gpu}"] if gpu else []),
            f"KVFERRY_SGLANG_SOCKET={self.directory / f'{name}-{{dp_rank}}-{{rank}}.sock'}",
            f"KVFERRY_SGLANG_ENGINE_ID={name}",
            *(f"{key}={value}" for key, value in self.sglang_environment(backend, ranks * stages * dp).items()),
            str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(self.directory / "model"),
            "--host", HOST, "--port", str(port), "--random-seed", "0", "--page-size", str(page_size),
            "--tp", str(ranks * dp if "--enable-dp-attention" in flags else ranks), "--dp", str(dp),
            "--pp-size", str(stages), *self.sglang_flags, *flags,
        ]  # fmt: skip
        if dp == 1:  # each DP rank needs another one, which SGLang chooses
            command += ["--nccl-port", str(self.free_port())]
        command += ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", backend]
        command += ["--disaggregation-bootstrap-port", str(bootstrap)]
        if mode == "decode" and not gpu:
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        process, log = self._start(f"sglang-{name}", command)
        url = f"http://{HOST}:{port}"
        return self._add(SglangEngine(f"sglang {name}", url, "/health", process, log, bootstrap, tuple(daemons)))

    def sglang_router(self, prefill: SglangEngine, decode: SglangEngine) -> Service:
        """Start sglang-router before them."""
        port = self.free_port()
        command = [
            str(PYTHON), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", HOST, "--policy",
            "round_robin", "--port", str(port), "--prometheus-port", str(self.free_port()), "--disable-retries",
            "--prefill", prefill.url, str(prefill.bootstrap), "--decode", decode.url,
        ]  # fmt: skip
        process, log = self._start("sglang-router", command)
        return self._add(Service("sglang-router", f"http://{HOST}:{port}", "/readiness", process, log))


@dataclass(frozen=True, slots=True, eq=False)
class SglangEngine(Service):
    """bootstrap: the port at which decode finds prefill. daemons: of its ranks; none where another backend moves KV."""

    bootstrap: int
    daemons: tuple[DaemonService, ...] = ()

    def leases(self) -> list[LeaseRecord]:
        """Leases that have not ended, on any rank."""
        return [lease for daemon in self.daemons for lease in leases_at(daemon)]

    def transfers(self, dp_rank: int = 0) -> list[TransferRecord]:
        """On rank 0 of a DP rank that has one rank, or of the only one, the oldest first."""
        return transfers_at(self.daemons[dp_rank])


@contextmanager
def sglang_fleet(model: ModelConfig | Callable[[Path], None]) -> Iterator[SglangFleet]:
    """Its checkpoint is written."""
    with fleet_of(SglangFleet, PYTHON) as fleet:
        fleet.model(model)
        yield fleet


def sglang_told_by(script: str, *arguments: object) -> Any:
    """As `told_by`, by SGLang's Python."""
    return told_by(script, *arguments, python=PYTHON)


def room(prefill: SglangEngine) -> dict[str, Any]:
    """The fields that a router adds to both legs of a request."""
    return {"bootstrap_host": HOST, "bootstrap_port": prefill.bootstrap, "bootstrap_room": next(ROOMS)}


def revoke(daemon: DaemonService, request_id: str) -> None:
    """The request's lease at this daemon."""
    httpx.delete(f"{daemon.url}/v1/leases/{request_id}", trust_env=False).raise_for_status()


@dataclass(frozen=True, slots=True)
class SglangPair:
    """A prefill and a decode engine, and what stands alone beside them."""

    prefill: SglangEngine
    decode: SglangEngine
    single: Service
    router: Service | None = None
    """Before them: it sends `same`'s prompts, or else `handover` does."""

    def handed_over(self, tokens: Sequence[int]) -> httpx.Response:
        """Decode's answer. Both legs are sent at once, as SGLang's router sends them."""
        where = room(self.prefill)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(generate, self.prefill, tokens, **where)
            moved = generate(self.decode, tokens, **where)
            assert prefilled.result().status_code == 200, prefilled.result().text
        return moved

    def handover(self, tokens: Sequence[int]) -> list[int]:
        return tokens_of(self.handed_over(tokens))

    def alone(self, tokens: Sequence[int]) -> list[int]:
        if isinstance(self.single, SglangEngine):
            return tokens_of(generate(self.single, tokens))
        return engines.tokens_of(engines.complete(self.single, tokens))

    def same(self, prompts: Sequence[Sequence[int]], at_once: int = 1, router: Service | None = None) -> None:
        """Assert that every prompt's tokens are those of a single engine. router: instead of the pair's own."""
        router = router or self.router

        def moved(tokens: Sequence[int]) -> list[int]:
            return tokens_of(generate(router, tokens)) if router else self.handover(tokens)

        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(moved, prompts))
        alone = [self.alone(tokens) for tokens in prompts]
        different = [len(tokens) for tokens, one, other in zip(prompts, answers, alone, strict=True) if one != other]
        assert not different, f"prompts of {different} tokens have other tokens: {answers}, alone {alone}"


def generate(
    engine: Service, tokens: Sequence[int], *, max_tokens: int = 16, custom: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    """custom: the request's custom_params."""
    body = body_of(tokens, max_tokens) | more
    body["sampling_params"]["custom_params"] = custom
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as http:
        return http.post(f"{engine.url}/generate", json=body)


@contextmanager
def leaving(engine: Service, tokens: Sequence[int], **more: Any) -> Iterator[None]:
    """Inside, a client waits for its answer; then it leaves."""
    url = httpx.URL(engine.url)
    connection = HTTPConnection(url.host, url.port or 0, timeout=ANSWER_S)
    with closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body_of(tokens, 16) | more), headers)
        yield


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    body = response.json()
    return list((body[0] if isinstance(body, list) else body)["output_ids"])


def streamed(engine: Service, tokens: Sequence[int], max_tokens: int = 16) -> list[int]:
    """The tokens of a streamed answer: SGLang sends them from the first on."""
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as http:
        events = list(events_of(http, f"{engine.url}/generate", body_of(tokens, max_tokens)))
    assert len(events) > 1, "the answer came in one piece"
    return list(events[-1]["output_ids"])


def body_of(tokens: Sequence[int], max_tokens: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(tokens), "sampling_params": parameters}
