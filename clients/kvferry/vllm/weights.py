"""Weights that vLLM replaces while it serves: when that is, and what the new ones are called.

KV is bound to the name of the weights that computed it (docs/engines.md). The workers see the replacement, as all of
vLLM's ways to replace weights end in a few functions of its worker, which are wrapped here. Each rank sees it between
the same two steps, for vLLM sends steps and calls to its workers in one order. The scheduler numbers the steps, and
with every publish names the oldest that may have computed any of its tokens.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.logger import init_logger

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import KvferryError, Unavailable
from kvferry.vllm.identity import checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = init_logger("vllm.kvferry.weights")
RELOADS = ("self", "args", "kwargs")
REPLACES: dict[str, tuple[str, ...]] = {
    "reload_weights": RELOADS,
    "start_weight_update": ("self",),
    "start_draft_weight_update": ("self",),
    "update_weights": ("self", "update_info"),
    "finish_weight_update": ("self",),
}
"""The functions of vLLM's worker that replace weights, with their parameters."""
ADAPTER = ("self", "lora_request")
"""The parameters of the function that reads every LoRA adapter."""


class Weights:
    """Those of one engine rank. Called by the worker's thread."""

    def __init__(self, daemon: BlockingEngineClient, config: VllmConfig) -> None:
        self._daemon, self._config = daemon, config
        self._engine = f"{config.kv_transfer_config.engine_id}/{config.instance_id}"
        self._registered = checkpoint(config)
        self._base = self._name = ""
        self._adapters: dict[str, tuple[str, str]] = {}
        """By name, what its first weights were and what they are now."""
        self.step = 0
        """The last that this worker was given."""
        self._replaced_at = -1
        """The last step before the last change."""
        self._changes = 0
        _watched.add(self)
        watch_worker()

    def of(self, since: int) -> str:
        """The name for what has been computed since this step; one that means nothing where the weights have been
        replaced meanwhile."""
        return self._name if since > self._replaced_at else f"{self._engine}, before a change"

    @contextmanager
    def replacing(self, *, from_disk: bool) -> Iterator[None]:
        """The weights are replaced inside. Where that fails nobody knows what they are."""
        self._replace(self._unknown())
        yield
        if from_disk:
            self._replace(self._checkpoint())

    def replaced(self, name: str) -> None:
        """Something else has replaced them, and they are called this."""
        self._replace(name)

    def rename(self, name: str) -> None:
        """They are the same, and are called this. What has their old name cannot be read any more."""
        self._base = name
        self._tell()

    def read_adapter(self, name: str, path: str) -> None:
        """A LoRA adapter has been read. Under a name that had other weights before it is a change."""
        digest = _digest_of(Path(path))
        first, now = self._adapters.setdefault(name, (digest, digest))
        if digest != now:
            self._adapters[name] = first, digest
            self._replace(self._base)

    def _replace(self, name: str) -> None:
        self._base, self._replaced_at = name, self.step
        self._tell()

    def _tell(self) -> None:
        again = sorted((name, now) for name, (first, now) in self._adapters.items() if now != first)
        adapters = f"+lora:{hashlib.sha256(repr(again).encode()).hexdigest()[:32]}" if again else ""
        self._name = f"{self._base}{adapters}"
        log.info("the weights were replaced: they are called %r", self._name)
        self._daemon.replace_weights(self._name)

    def _unknown(self) -> str:
        """A new name that all ranks make alike."""
        self._changes += 1
        return f"{self._engine}/{self.step}.{self._changes}"

    def _checkpoint(self) -> str:
        try:
            name = checkpoint(self._config)
        except KvferryError as error:
            log.warning("the checkpoint has no name: %s", error)
            return self._unknown()
        return "" if name == self._registered else name


_watched: WeakSet[Weights] = WeakSet()


def watch_worker() -> None:
    """Wrap what replaces weights in this process. Idempotent. Raises KvferryError (`unsupported_vllm`)."""
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "kvferry_weights"):
        return
    for name, parameters in REPLACES.items():
        _check(Worker, name, parameters)
    _check(WorkerLoRAManager, "_load_adapter", ADAPTER)
    for name in REPLACES:
        setattr(Worker, name, _replacing(getattr(Worker, name)))
    WorkerLoRAManager._load_adapter = _reading(WorkerLoRAManager._load_adapter)
    Worker.kvferry_weights = _said("replaced")
    Worker.kvferry_rename_weights = _said("rename")


def watch_core() -> None:
    """Wrap what gives weights their version in this process. Idempotent. Raises KvferryError (`unsupported_vllm`)."""
    from vllm.v1.engine.core import EngineCore

    before = EngineCore.set_weight_version
    if hasattr(before, "__wrapped__"):
        return
    _check(EngineCore, "set_weight_version", ("self", "weight_version"))

    @functools.wraps(before)
    def set_weight_version(core: Any, weight_version: str) -> None:
        before(core, weight_version)
        core.collective_rpc("kvferry_rename_weights", args=(weight_version,))

    EngineCore.set_weight_version = set_weight_version


def _check(holder: type, name: str, parameters: tuple[str, ...]) -> None:
    found = getattr(holder, name, None)
    has = tuple(inspect.signature(found).parameters) if callable(found) else ()
    if has != parameters:
        from vllm import __version__

        what = f"vLLM {__version__} is not one that kvferry.vllm knows: its {holder.__name__}.{name} takes {has}"
        raise Unavailable(
            "unsupported_vllm", what, field=name, value=has, remedy="install a vLLM that docs/vllm.md names"
        )


def _replacing(replace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replace)
    def replaced(worker: Any, *args: Any, **named: Any) -> Any:
        given = args[0] if args else named.get("weights_iterator")
        from_disk = replace.__name__ == "reload_weights" and given is None
        with ExitStack() as changes:
            for weights in _watched:
                changes.enter_context(weights.replacing(from_disk=from_disk))
            return replace(worker, *args, **named)

    return replaced


def _reading(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def loaded(manager: Any, lora_request: Any) -> Any:
        adapter = read(manager, lora_request)
        for weights in _watched:
            weights.read_adapter(lora_request.lora_name, lora_request.lora_path)
        return adapter

    return loaded


def _said(what: str) -> Callable[[Any, str], None]:
    """For vLLM's collective_rpc."""

    def said(worker: Any, name: str) -> None:
        for weights in _watched:
            getattr(weights, what)(name)

    return said


def _digest_of(adapter: Path) -> str:
    """Of the whole adapter, which is small; of what is no folder its name."""
    digest = hashlib.sha256(str(adapter).encode() if not adapter.is_dir() else b"")
    for file in sorted(adapter.glob("adapter_*")):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
