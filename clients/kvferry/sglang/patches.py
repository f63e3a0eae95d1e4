"""All that this plug-in changes in SGLang, by name, with the reason.

SGLang loads plug-ins by entry point, and its HookRegistry wraps functions by name, but a transfer backend is a member
of an enumeration and a branch of one function. Each piece is looked at before it is replaced: on a version where it is
not as expected nothing is changed, the log says what differs, and `--disaggregation-transfer-backend kvferry` is
refused.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from kvferry.errors import Unavailable
from kvferry.sglang import BACKEND

TESTED = "0.5.23"
HOLDERS = (
    "sglang.srt.disaggregation.utils", "sglang.srt.disaggregation.prefill", "sglang.srt.disaggregation.decode",
    "sglang.srt.managers.disagg_service",
)  # fmt: skip
"""Modules that have `get_kv_class`, each under that name. There is no registry of backends."""
EXPECTED = {
    "sglang.srt.arg_groups.choices.add_disagg_transfer_backend_choices": (),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    **{f"{module}.get_kv_class": ("transfer_backend", "class_type") for module in HOLDERS},
    "sglang.srt.disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases": ("self",),
}
"""The functions of SGLang that this module needs as they are, beside those of HOOKS, each with the names of its first
parameters."""


def install() -> None:
    """Idempotent. Raises KvferryError (`unsupported_sglang`) before anything is changed."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices

    if BACKEND in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    for target, parameters in (EXPECTED | {target: parameters for target, (parameters, _, _) in HOOKS.items()}).items():
        _check(target, parameters)
    add_disagg_transfer_backend_choices([BACKEND])
    _add_backend()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (_, hook, when) in HOOKS.items():  # SGLang applies them when all plug-ins have been loaded
        HookRegistry.register(target, hook, HookType[when])


def _check(target: str, parameters: tuple[str, ...]) -> None:
    try:
        has = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        why = has[: len(parameters)] != parameters and f"its parameters are {has}, and {parameters} are expected"
    except (ImportError, AttributeError) as error:
        why = str(error)
    if why:
        what = f"SGLang {version('sglang')} is not one that kvferry.sglang knows: {target}: {why}"
        raise Unavailable("unsupported_sglang", what, field=target, remedy=f"install sglang=={TESTED}")


def _add_backend() -> None:
    """A member of TransferBackend, which Python's Enum does not let be added, and its classes."""
    from sglang.srt.disaggregation import utils

    kinds, backends = utils.KVClassType, utils.TransferBackend
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    backends._member_map_[member._name_] = backends._value2member_map_[BACKEND] = member
    backends._member_names_.append(member._name_)
    before = utils.get_kv_class

    def get_kv_class(transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend is not member or class_type is kinds.KVARGS:
            return before(transfer_backend, class_type)
        from kvferry.sglang.manager import BootstrapServer, Manager
        from kvferry.sglang.receiver import Receiver
        from kvferry.sglang.sender import Sender

        return {
            kinds.MANAGER: Manager, kinds.SENDER: Sender, kinds.RECEIVER: Receiver,
            kinds.BOOTSTRAP_SERVER: BootstrapServer,
        }[class_type]  # fmt: skip

    for module in HOLDERS:
        importlib.import_module(module).get_kv_class = get_kv_class  # type: ignore[attr-defined]  # of a module


def _rank() -> Any:
    """This process's, where its engine is one side of a pair that kvferry serves; otherwise None."""
    from kvferry.sglang.rank import chosen, this_rank

    return this_rank() if chosen() else None


def _place(create: Callable[..., Any], pool: Any, **more: Any) -> Any:
    create = partial(create, **more)
    return rank.place(create, pool, more.get("device") or pool.device) if (rank := _rank()) else create(pool)


def _number(broadcast: Callable[..., Any], receiver: Any, recv_reqs: Any, *rest: Any, **more: Any) -> Any:
    if recv_reqs and (rank := _rank()) and rank.number == 0:  # a later stage of a pipeline gets them from there
        from kvferry.sglang.prompt import number

        number(recv_reqs, rank.numbers)
    return broadcast(receiver, recv_reqs, *rest, **more)


def _bind_sender(created: bool, queue: Any, req: Any, *_: object, **__: object) -> None:
    _bind(req.disagg_kv_sender if created else None, req)


def _bind_receiver(create: Callable[..., Any], queue: Any, req: Any, *rest: object, **more: object) -> Any:
    from kvferry.sglang.prompt import HOST, PORT

    if req.bootstrap_host is None and _rank():  # SGLang's scheduler would end by that
        req.bootstrap_host, req.bootstrap_port = HOST, PORT
    decode_req = create(queue, req, *rest, **more)
    _bind(decode_req.kv_receiver, req)
    return decode_req


def _bind(end: Any, req: Any) -> None:
    """SGLang's own senders and receivers, of warm-up requests, are bound to nothing."""
    if hasattr(end, "bind"):
        end.bind(req)


def _note_queue(queue: Any) -> None:
    if rank := _rank():
        rank.queue = queue


def _wait_when_idle(_: None, scheduler: Any) -> None:
    if (rank := _rank()) and not scheduler.is_fully_idle():
        channels = scheduler.ipc_channels
        rank.idle.wait(channels.recv_from_tokenizer, channels.recv_from_rpc)


def _replace_weights(replace: Callable[..., Any], updater: Any, said: Any) -> Any:
    # check_weights has harmless actions
    if not (rank := _rank()) or getattr(said, "action", "reset_tensors") != "reset_tensors":
        return replace(updater, said)
    from_disk = replace.__name__ == "update_weights_from_disk"
    reloaded = (lambda: rank.reloaded(said.model_path)) if from_disk else None
    return rank.updates.part(replace.__name__, lambda: replace(updater, said), reloaded)


def _name_weights(_: None, scheduler: Any, new_version: str | None) -> None:
    if new_version is not None and (rank := _rank()):
        rank.updates.tell(new_version)


def _note_adapter(result: Any, manager: Any, lora_ref: Any) -> None:
    if result.success and (rank := _rank()):
        rank.adapters.loaded(lora_ref.lora_id, lora_ref.lora_path)


def _count_step(*_: object, **__: object) -> None:
    if rank := _rank():
        rank.begin_step()


def _note_flush(flushed: bool, scheduler: Any, *_: object, **__: object) -> None:
    storage = scheduler.enable_hicache_storage or scheduler.enable_lmcache  # which keeps what it has
    if flushed and not storage and (rank := _rank()):
        rank.cached_since = rank.weights.step + 1


UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
REPLACES = (
    "update_weights_from_disk", "update_weights_from_ipc", "begin_weight_update", "update_weights_from_distributed",
    "update_weights_from_tensor", "end_weight_update", "check_weights",
)  # fmt: skip
BROADCASTER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS: dict[str, tuple[tuple[str, ...], Callable[..., Any], str]] = {
    # The cache is the daemon's memory: SGLang has a hook for that on GPUs (a custom pool by name), none for the host.
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal": (("self",), _place, "AROUND"),
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers": (("self",), _place, "AROUND"),
    "sglang.srt.mem_cache.memory_pool.MambaPool.__init__": (("self",), _place, "AROUND"),
    # An attempt and a lease have one number on all ranks: the first rank gives it, with what it broadcasts already.
    f"{BROADCASTER}._broadcast_reqs_across_ranks": (("self", "recv_reqs"), _number, "AROUND"),
    # A sender and a receiver are not told the request, which their digest is made of.
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender": (("self", "req"), _bind_sender, "AFTER"),
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue":
        (("self", "req"), _bind_receiver, "AROUND"),
    # A manager is told addresses, and neither the pools that have them nor how far windows reach.
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": (("self",), _note_queue, "BEFORE"),
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": (("self",), _note_queue, "BEFORE"),
    # SGLang keeps a core busy, which the daemons need, where it has nothing to compute and waits for transfers.
    f"{SCHEDULER}.on_idle": (("self",), _wait_when_idle, "AFTER"),
    # KV is bound to the weights that computed it. A session writes them between its begin and its end, also by itself.
    **{f"{UPDATER}.{name}": (("self", "recv_req"), _replace_weights, "AROUND") for name in REPLACES},
    f"{SCHEDULER}.record_weight_version_change": (("self", "new_version"), _name_weights, "AFTER"),
    # An adapter is bound by its content: SGLang's id of it is made from its name and its path.
    "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter": (("self", "lora_ref"), _note_adapter, "AFTER"),
    f"{SCHEDULER}.run_batch": (("self", "batch"), _count_step, "BEFORE"),
    f"{SCHEDULER}.flush_cache": (("self", "empty_cache"), _note_flush, "AFTER"),
}  # fmt: skip
"""The functions of SGLang that are wrapped: the names of their first parameters, by what, and where."""
