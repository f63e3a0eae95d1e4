"""Real vLLM engines on the CPU, each rank with a daemon, and what to ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvferry.reference.config import PRESETS, ModelConfig, ModelSource
from kvferry.reference.model import write_checkpoint
from kvferry.schemas import LeaseRecord, Totals, TransferRecord, TransferState
from kvferryd.demo.fleet import HOST, DaemonService, Fleet, Service, ServiceError

PYTHON = Path(__file__).parents[2] / os.environ.get("ENGINES_VENV", ".venv-engines") / "bin" / "python"
SITE, WORKER = Path(__file__).parent / "site", Path(__file__).parent / "worker"
START_S = 240.0
ANSWER_S = 240.0
SETTLE_S = 60.0
MODEL = PRESETS["demo"]
"""Four layers, six KV heads. Its weights make the next token depend on the whole prompt: see SeededWeights."""
LENGTHS = [
    5, 6, 17, 31, 32, 33, 48, 63, 64, 65, 95, 96, 97, 100, 127, 128, 129, 200, 250, 300, 400, 511, 512, 513, 600, 700,
    800, 1000, 1024, 1025, 1300, 1500,
]  # fmt: skip
"""32 prompts: every side of a block (32, 64, 96) and of a chunk (512)."""
PREFILL_LEG = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""Fields that every router sends to a prefill engine."""


Row: TypeAlias = tuple[int, ...]


class Engines(Fleet):
    """A Fleet that also starts vLLM, from a virtual environment of its own (`make engines-venv`)."""

    running: ClassVar[list[Engines]] = []
    flags: ClassVar[Sequence[str]] = (
        "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "4096",
        "--max-num-batched-tokens", "512",
    )  # fmt: skip
    """Flags of every engine."""
    python_path: ClassVar[Sequence[str]] = (str(SITE),)

    def __init__(self) -> None:
        super().__init__()
        self.running.append(self)

    def close(self) -> None:
        self.running.remove(self)
        super().close()

    def model(self, model: ModelConfig | Callable[[Path], None] = MODEL) -> Path:
        """A checkpoint folder: of a configuration, or what a function writes into it."""
        folder = self.directory / "model"
        if isinstance(model, ModelConfig):
            write_checkpoint(ModelSource(model), folder)
        else:
            model(folder)
        return folder

    def vllm(
        self,
        name: str,
        model: Path,
        daemons: Sequence[DaemonService] = (),
        *,
        ranks: int = 1,
        stages: int = 1,
        block_size: int = 32,
        options: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        beside: Sequence[dict[str, Any]] = (),
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Service:
        """An engine with a rank per daemon; without any it has vLLM's own NixlConnector and `ranks` of them.

        stages: of a pipeline, among which the ranks are divided. options: kv_connector_extra_config. beside: other
        connectors, which vLLM's MultiConnector asks after ours.
        """
        port = self.free_port()
        command = [
            "/usr/bin/env", f"VLLM_NIXL_SIDE_CHANNEL_PORT={self.free_port()}", f"PYTHONPATH={self._python_path()}",
            *(f"{name}={value}" for name, value in (environment or {}).items()),
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
            "--host", HOST, "--port", str(port), "--seed", "0", "--skip-tokenizer-init",
            "--block-size", str(block_size), "--worker-extension-cls", "kv_rows.KvRows", *self.flags, *flags,
        ]  # fmt: skip
        connector: dict[str, Any] = {"kv_role": "kv_both", "kv_connector": "NixlConnector"}
        if daemons:
            connector |= {"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm"}
            extra = {"socket": str(self.directory / f"{name}-{{rank}}.sock")} | (options or {})
            connector |= {"kv_connector_extra_config": extra}
        command += ["--tensor-parallel-size", str((len(daemons) or ranks) // stages)]
        command += ["--pipeline-parallel-size", str(stages)]
        connector |= transfer or {}
        if beside:
            several = {"connectors": [connector, *beside]}
            connector = {
                "kv_role": "kv_both", "kv_connector": "MultiConnector", "kv_connector_extra_config": several,
            }  # fmt: skip
        command += ["--kv-transfer-config", json.dumps({"engine_id": name} | connector)]
        process, log = self._start(f"vllm-{name}", command)
        return self._add(Service(f"vllm {name}", f"http://{HOST}:{port}", "/health", process, log))

    def in_process(self, name: str) -> Listener:
        """Start vLLM in one process (in_process.py), which connects to the listener."""
        path = self.directory / f"{name}.asked"
        listener = Listener(str(path), family="AF_UNIX")
        listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]  # it has no other way
        script = Path(__file__).with_name("in_process.py")
        command = ["/usr/bin/env", f"PYTHONPATH={self._python_path()}", str(PYTHON), str(script), str(path)]
        process, log = self._start(f"vllm-{name}", command)
        self._add(Service(f"vllm {name}", "", "", process, log))
        return listener

    def router(self, name: str, *command: str, path: str = "/health") -> Service:
        """Start another project's router, from vLLM's environment. command: its module and flags, without a port."""
        port = self.free_port()
        process, log = self._start(name, [str(PYTHON), "-m", *command, "--host", HOST, "--port", str(port)])
        return self._add(Service(name, f"http://{HOST}:{port}", path, process, log))

    def _python_path(self) -> str:
        return os.pathsep.join(filter(None, (*self.python_path, str(WORKER), os.environ.get("PYTHONPATH"))))

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for kv_rows
            "VLLM_CACHE_ROOT": str(PYTHON.parents[1] / "cache"), "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip


SomeEngines = TypeVar("SomeEngines", bound=Engines)


@dataclass
class Pair:
    """A prefill engine and a decode engine."""

    fleet: Engines
    prefill: Service
    decode: Service
    prefill_daemons: list[DaemonService]
    decode_daemons: list[DaemonService]

    def handover(self, tokens: Sequence[int], **more: Any) -> list[int]:
        """Prefill on one, decode on the other: the tokens that the client gets."""
        return tokens_of(complete(self.decode, tokens, kv_transfer_params=self.prefilled(tokens), **more))

    def rows_of_handover(self, tokens: Sequence[int], size: int) -> tuple[set[Row], set[Row]]:
        """Hand over a prompt that neither engine has seen: the rows of `size` tokens that prefill has computed, and
        those that decode has since."""
        sides = (self.prefill, self.decode)
        known = [kv_rows(side, size) for side in sides]
        self.handover(tokens, max_tokens=1)
        computed, moved = (kv_rows(side, size) - before for side, before in zip(sides, known, strict=True))
        return computed, moved

    def prefilled(self, tokens: Sequence[int], http: httpx.Client | None = None) -> dict[str, Any]:
        """The answer's kv_transfer_params. http: whose connections are used."""
        answer = complete(self.prefill, tokens, http, max_tokens=1, kv_transfer_params=PREFILL_LEG)
        assert answer.status_code == 200, answer.text
        params = answer.json()["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    def alone(self, tokens: Sequence[int], **more: Any) -> list[int]:
        """The prefill engine's answer without help."""
        return tokens_of(complete(self.prefill, tokens, **more))

    def split(self, tokens: Sequence[int], *, max_tokens: int = 16) -> list[int]:
        """The same, but the prompt's last token is computed alone, as a decode engine does: sums of bfloat16 differ
        with what is computed together. Both engines have worker/forced.py."""
        more = {"max_tokens": max_tokens + 1, "vllm_xargs": {"first": tokens[-1]}}
        last, *found = tokens_of(complete(self.prefill, tokens[:-1], **more))
        assert last == tokens[-1]
        return found

    def kill(self, engine: Service) -> None:
        engine.signal(signal.SIGKILL)
        engine.process.wait(SETTLE_S)

    def start_again(self, dead: Service, *, timeout_s: float = START_S) -> None:
        """At the address that it had, beside the same daemons."""
        engine = self.fleet.again(dead)
        asyncio.run(self.fleet.ready(engine, timeout_s=timeout_s))
        if dead is self.prefill:
            self.prefill = engine
        else:
            self.decode = engine

    def transfers(self) -> list[TransferRecord]:
        """On rank 0 of decode, the oldest first."""
        return transfers_at(self.decode_daemons[0])

    def leases(self) -> list[LeaseRecord]:
        return leases_at(self.prefill_daemons[0])


def transfers_at(daemon: DaemonService) -> list[TransferRecord]:
    """The oldest first."""
    body = httpx.get(f"{daemon.url}/v1/transfers?limit=10000", trust_env=False).json()
    return [TransferRecord.model_validate(one) for one in body["transfers"]]


def at_rest(daemon: DaemonService) -> bool:
    """Nothing is read, served, waited for or quarantined."""
    totals = Totals.model_validate(httpx.get(f"{daemon.url}/v1/totals", trust_env=False).json())
    under_way = [state for state, count in totals.transfers.items() if count and not TransferState(state).ended]
    return not (
        under_way or totals.live_readers or totals.queue or totals.quarantined_bytes or totals.staging_used_bytes
    )


def leases_at(daemon: DaemonService) -> list[LeaseRecord]:
    """Leases that have not ended."""
    body = httpx.get(f"{daemon.url}/v1/leases", trust_env=False).json()
    return [LeaseRecord.model_validate(one) for one in body["leases"]]


@dataclass
class Several:
    """Engines of one model, by name: any two of them are a pair."""

    fleet: Engines
    engines: dict[str, Service]
    daemons: dict[str, list[DaemonService]]

    def pair(self, prefill: str, decode: str) -> Pair:
        sides = (prefill, decode)
        return Pair(self.fleet, *(self.engines[side] for side in sides), *(self.daemons[side] for side in sides))


def kv_rows(engine: Service, tokens: int) -> set[Row]:
    """For every `tokens` slots of the engine's cache a hash of each head's KV (worker/kv_rows.py), rank after rank."""
    found = of_workers(engine, "kv_rows", str(tokens))
    return {tuple(chain.from_iterable(row)) for row in zip(*found, strict=True)}


def of_workers(engine: Service, method: str, *args: str) -> list[Any]:
    """The answers of each rank's worker, by a method of worker/kv_rows.py."""
    body = {"method": method, "args": args}
    answer = httpx.post(f"{engine.url}/collective_rpc", json=body, trust_env=False, timeout=ANSWER_S)
    answer.raise_for_status()
    return list(answer.json()["results"])


def installed(python: Path = PYTHON) -> None:
    """Skip the test where there is no such environment."""
    if not python.exists():
        pytest.skip(f"there is no {python}: make engines-venv, or engines-sglang, installs its engine")


@contextmanager
def fleet_of(kind: type[SomeEngines], python: Path = PYTHON) -> Iterator[SomeEngines]:
    """A fleet whose engines this Python has. A service of it that does not come up says how its log ends."""
    installed(python)
    with closing(kind()) as fleet:
        try:
            yield fleet
        except ServiceError as error:  # its log goes with the fleet
            error.add_note(error.service.tail(80))
            raise


@contextmanager
def lone_daemon() -> Iterator[DaemonService]:
    """A daemon that serves, with no engine."""
    with closing(Engines()) as fleet:
        daemon = fleet.daemon("p-0")
        asyncio.run(fleet.ready(daemon, timeout_s=60))
        yield daemon


@contextmanager
def several(
    model: ModelConfig | Callable[[Path], None],
    sides: Mapping[str, dict[str, Any]],
    *,
    daemon_flags: Sequence[str] = (),
    kvferry: bool = True,
    start_s: float = START_S,
) -> Iterator[Several]:
    """Start engines with their daemons, one for each rank. sides: for `Engines.vllm`.

    kvferry: or else vLLM's own NixlConnector, without daemons. Raises ServiceError.
    """
    with fleet_of(Engines) as fleet:
        daemons = {
            name: fleet.daemons(name, side.get("ranks", 1), flags=daemon_flags) if kvferry else []
            for name, side in sides.items()
        }
        asyncio.run(fleet.ready(*chain.from_iterable(daemons.values()), timeout_s=start_s))
        folder = fleet.model(model)
        engines = {name: fleet.vllm(name, folder, daemons[name], **side) for name, side in sides.items()}
        asyncio.run(fleet.ready(*engines.values(), timeout_s=start_s))
        yield Several(fleet, engines, daemons)


@contextmanager
def pair(
    model: ModelConfig | Callable[[Path], None] = MODEL,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    daemon_flags: Sequence[str] = (),
    kvferry: bool = True,
    start_s: float = START_S,
) -> Iterator[Pair]:
    """Two of `several`."""
    sides = {"p": prefill or {}, "d": decode or {}}
    with several(model, sides, daemon_flags=daemon_flags, kvferry=kvferry, start_s=start_s) as both:
        yield both.pair("p", "d")


def handed_over(engines: Pair, prompts: Sequence[Sequence[int]], at_once: int = 1, **more: Any) -> None:
    """Assert that every prompt's tokens are those of one engine."""
    with ThreadPoolExecutor(at_once) as pool:
        moved = list(pool.map(lambda tokens: engines.handover(tokens, **more), prompts))
        alone = list(pool.map(lambda tokens: engines.alone(tokens, **more), prompts))
    different = [len(tokens) for tokens, one, other in zip(prompts, moved, alone, strict=True) if one != other]
    assert not different, f"prompts of {different} tokens have other tokens: {moved}, alone {alone}"


def worded(folder: Path) -> None:
    """Write a checkpoint with a tokenizer and a chat template: token 7 is the word "w7", and a chat is its words."""
    write_checkpoint(ModelSource(MODEL), folder)
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(MODEL.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def words(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def checkpoint(name: str, **changes: Any) -> Callable[[Path], None]:
    """A writer of a model of tests/engines/checkpoints.py into a folder. changes: to its configuration."""
    return lambda folder: ran("checkpoints.py", folder, name, json.dumps(changes)) and None


def ran(script: str, *arguments: object, python: Path = PYTHON) -> str:
    """The words of a script of this folder, run by the Python that an engine is installed for."""
    installed(python)
    forks = _forks(python)
    assert forks.stdin and forks.stdout
    with tempfile.TemporaryDirectory() as folder:
        said, errors = Path(folder, "said"), Path(folder, "errors")
        command = [str(Path(__file__).with_name(script)), *map(str, arguments)]
        print(json.dumps([command, [str(said), str(errors)]]), file=forks.stdin, flush=True)
        assert forks.stdout.readline() == "0\n", errors.read_text() if errors.exists() else "its error is above"
        return said.read_text()


@cache
def _forks(python: Path) -> subprocess.Popen[str]:
    """Runs scripts until pytest ends."""
    module = "descriptions" if python == PYTHON else "sglang.srt.managers.scheduler"
    command = [python, Path(__file__).with_name("forks.py"), module]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told_by(script: str, *arguments: object, python: Path = PYTHON) -> Any:
    """The last of them, a line of JSON."""
    return json.loads(ran(script, *arguments, python=python).splitlines()[-1])


def whole(tokens: int, block_size: int = 32) -> int:
    """Up to the end of their last block: whole blocks are moved."""
    return -(-tokens // block_size) * block_size


def prompt(length: int, seed: int = 0, vocabulary: int = MODEL.vocab_size) -> list[int]:
    """Token ids, the same ones for the same arguments; 0 to 2 are left to the model."""
    return random.Random(seed * 4096 + length).choices(range(3, vocabulary), k=length)


def complete(
    engine: Service,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    http: httpx.Client | None = None,
    *,
    max_tokens: int = 16,
    **more: Any,
) -> httpx.Response:
    """http: whose connections are used; one of its own where none is given."""
    body = {
        "model": "m", "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    with contextlib.nullcontext(http) if http else httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        return client.post(f"{engine.url}/v1/completions", json=body | more)


def events_of(http: httpx.Client, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, as they arrive. Raises httpx.HTTPError, also where an event is an error."""
    with http.stream("POST", url, json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise httpx.HTTPError(str(event["error"]))
                yield event


def tokens_of(response: httpx.Response) -> list[int]:
    return choices_of(response)[0]


def choices_of(response: httpx.Response) -> list[list[int]]:
    """The tokens of each answer to each prompt."""
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def metric(engine: Service, name: str, label: str = "") -> float:
    """label: one of those that its line must have, such as reason="failed"."""
    for line in httpx.get(f"{engine.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith(f"vllm:{name}{{") and label in line:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"the engine does not tell its {name}")


def missed(engine: Service, reason: str) -> float:
    """How often a handover was asked for and did not come about."""
    return metric(engine, "kvferry_missed_handovers_total", f'reason="{reason}"')


def cache_usage(engine: Service) -> float:
    """The share of the engine's blocks that requests have."""
    return metric(engine, "kv_cache_usage_perc")


def eventually(holds: Callable[[], bool], within_s: float = SETTLE_S) -> bool:
    """Engines and daemons are other processes: they can only be asked again."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
