"""Weights that vLLM replaces while it serves: when that is, and what the new ones are called.

KV is bound to the name of the weights that computed it (docs/engines.md). The workers see the replacement, as all of
vLLM's ways to replace weights end in a few functions of its worker, which are wrapped here. Each rank sees it between
the same two steps, for vLLM sends steps and calls to its workers in one order. The scheduler numbers the steps, and
with every publish names the oldest that may have computed any of its tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.logger import init_logger

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import KvferryError, Unavailable
from kvferry.vllm.identity import checkpoint
from kvferry.weights import Weights, digest_of_adapter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = init_logger("vllm.kvferry.weights")
RELOADS = ("self", "args", "kwargs")
REPLACES: dict[str, tuple[str, ...]] = {
    "reload_weights": RELOADS,
    "reset_weights": ("self",),
    "start_weight_update": ("self",),
    "start_draft_weight_update": ("self",),
    "update_weights": ("self", "update_info"),
    "finish_weight_update": ("self",),
}
"""The functions of vLLM's worker that replace weights, with their parameters."""
ADAPTER = ("self", "lora_request")
"""The parameters of the function that reads every LoRA adapter."""


class VllmWeights(Weights):
    """Those of one rank of vLLM. Called by the worker's thread."""

    def __init__(self, daemon: BlockingEngineClient, config: VllmConfig) -> None:
        super().__init__(daemon, f"{config.kv_transfer_config.engine_id}/{config.instance_id}", log.info)
        self._config, self._registered = config, checkpoint(config)
        _watched.add(self)
        watch_worker()

    def reloaded(self) -> None:
        """They are those of the checkpoint that the configuration names by now."""
        try:
            name = checkpoint(self._config)
        except KvferryError as error:
            log.warning("the checkpoint has no name: %s", error)
        else:
            self.rename("" if name == self._registered else name)


_watched: WeakSet[VllmWeights] = WeakSet()


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
                changes.enter_context(weights.replacing())
            result = replace(worker, *args, **named)
        for weights in _watched if from_disk else ():
            weights.reloaded()
        return result

    return replaced


def _reading(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def loaded(manager: Any, lora_request: Any) -> Any:
        adapter = read(manager, lora_request)
        for weights in _watched:
            weights.adapter_loaded(lora_request.lora_name, digest_of_adapter(lora_request.lora_path))
        return adapter

    return loaded


def _said(what: str) -> Callable[[Any, str], None]:
    """For vLLM's collective_rpc."""

    def said(worker: Any, name: str) -> None:
        for weights in _watched:
            getattr(weights, what)(name)

    return said
