"""Weights that vLLM replaces while it serves: when that is, and what the new ones are called.

KV is bound to the name of the weights that computed it (docs/engines.md). The workers see the replacement, as all of
vLLM's ways to replace weights end in a few functions of its worker, which are wrapped here. Each rank sees it between
the same two steps, for vLLM sends steps and calls to its workers in one order. The scheduler numbers the steps, and
with every publish names the oldest that may have computed any of its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import KvferryError
from kvferry.updates import VLLM, Updates
from kvferry.vllm.identity import adapter_of, adapters, checkpoint
from kvferry.weights import Weights, digest_of_adapter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = init_logger("vllm.kvferry.weights")
REPLACES = (
    "reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights",
    "finish_weight_update",
)  # fmt: skip
"""The functions of vLLM's worker that replace weights."""


class VllmWeights(Weights):
    """The weights of one rank of vLLM. Called by the worker's thread."""

    def __init__(self, daemon: BlockingEngineClient, config: VllmConfig) -> None:
        super().__init__(daemon, f"{config.kv_transfer_config.engine_id}/{config.instance_id}", log.info)
        self._config = config
        self.registered = self._checkpoint()
        self.updates = Updates(self, VLLM)
        _watched.add(self)
        watch_worker()

    def read_again(self) -> None:
        """They are those of the checkpoint that the configuration names by now."""
        self.reloaded(self._checkpoint())

    def _checkpoint(self) -> str:
        """Its name; none where its files are not laid out as they are known to be."""
        try:
            return checkpoint(self._config)
        except KvferryError as error:
            log.warning("the checkpoint has no name: %s", error)
            return ""


_watched: WeakSet[VllmWeights] = WeakSet()


def watch_worker() -> None:
    """Wrap what replaces weights in this process. Idempotent."""
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, "kvferry_weights"):
        for name in REPLACES:
            _wrap(Worker, name, _replacing)
        _wrap(WorkerLoRAManager, "_load_adapter", _reading)
        Worker.kvferry_weights = _said("replaced")
        Worker.kvferry_rename_weights = _said("tell")


def watch_core() -> None:
    """Wrap what gives weights their version in this process, what loads adapters, and what empties other connectors.
    Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, "kvferry_watched"):
        EngineCore.kvferry_watched = True
        _wrap(EngineCore, "set_weight_version", _naming)
        _wrap(EngineCore, "add_lora", _adding)
        _wrap(MultiConnector, "bind_kv_cache_manager", _joining)
        _wrap(MultiConnector, "reset_cache", _emptying)


def _wrap(holder: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """A vLLM that has another function in its place is one that this was not written for, and serves all the same."""
    if callable(found := getattr(holder, name, None)):
        setattr(holder, name, by(found))
    else:
        log.warning(
            "vLLM %s has no %s.%s: weights that it replaces in another way are not seen to be others. Say so by "
            "collective_rpc('kvferry_weights', args=(NAME,))", __version__, holder.__name__, name,
        )  # fmt: skip


def _naming(give: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(give)
    def named(core: Any, weight_version: str) -> None:
        give(core, weight_version)
        core.collective_rpc("kvferry_rename_weights", args=(weight_version,))

    return named


def _adding(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def added(core: Any, lora_request: Any) -> Any:
        done = add(core, lora_request)
        adapters.loaded(*adapter_of(lora_request))
        return done

    return added


def _joining(bind: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM gives each of several connectors a configuration in which it is alone."""

    @functools.wraps(bind)
    def joined(several: Any, caches: Any) -> None:
        for each in several._connectors:
            getattr(each, "joined", lambda: None)()
        bind(several, caches)

    return joined


def _emptying(empty: Callable[..., Any]) -> Callable[..., Any]:
    """All are emptied if none fails, and each knows how: vLLM takes no answer for a good one."""

    @functools.wraps(empty)
    def emptied(several: Any) -> Any:
        done = empty(several)
        if done and all(type(each).reset_cache is not KVConnectorBase_V1.reset_cache for each in several._connectors):
            for each in several._connectors:
                getattr(each, "others_emptied", lambda: None)()
        return done

    return emptied


def _replacing(replace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replace)
    def replaced(worker: Any, *args: Any, **named: Any) -> Any:
        given = args[0] if args else named.get("weights_iterator")
        from_disk = replace.__name__ == "reload_weights" and given is None
        work = functools.partial(replace, worker, *args, **named)
        for weights in _watched:
            reloaded = weights.read_again if from_disk else None
            work = functools.partial(weights.updates.part, replace.__name__, work, reloaded)
        return work()

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
            getattr(weights.updates, what)(name)

    return said
