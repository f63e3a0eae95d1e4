"""A rank of this engine, in the process of its scheduler: the session with its daemon, and the cache."""

from __future__ import annotations

import itertools
import json
import logging
import math
import socket
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_model, get_parallel, get_serving, get_spec
from transformers import AutoConfig

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import KvferryError, Malformed
from kvferry.fingerprint import checkpoint_name, model_fingerprint, turned
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import CudaRegion, SharedRegion
from kvferry.memory.fences import Fence
from kvferry.memory.placing import buffers_of, placed, region_nbytes
from kvferry.sglang import BACKEND
from kvferry.sglang.cache import describe, scales
from kvferry.sglang.idle import Idle
from kvferry.sglang.options import Options
from kvferry.updates import SGLANG, Updates
from kvferry.weights import Adapters, Weights

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

log = logging.getLogger(__name__)


class Rank:
    """Made before SGLang allocates its cache, which is before there is a manager. Daemons know each DP rank of an
    SGLang server as an engine of its own."""

    def __init__(self) -> None:
        parallel, self.options = get_parallel(), Options.read()
        # SGLang frees the blocks of a failed request after 30 s even where they may still be written.
        envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.set(True)
        envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.set(math.inf)
        self._tp = parallel.attn_tp_size
        self.number, self.count = parallel.pp_rank * self._tp + parallel.attn_tp_rank, parallel.pp_size * self._tp
        self.dp_number, self.dp_count = parallel.dp_rank or parallel.attn_dp_rank, parallel.num_dp_ranks
        said = self.options.engine_id or f"sglang-{socket.gethostname()}-{get_serving().port}", uuid.uuid4().hex
        name, self._epoch = parallel.attn_tp_group.broadcast_object(parallel.pp_group.broadcast_object(said))
        self.engine_id = f"{name}-dp{self.dp_number}" if self.dp_count > 1 else name
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        path = self.options.socket_of(self.number, self.count, self.dp_number, self.dp_count, gpu)
        self.daemon = BlockingEngineClient.connect(
            path, engine_id=self.engine_id, epoch=self._epoch, rank=self.number, world_size=self.count,
            timeout_s=self.options.connect_timeout_s, say=log.warning,
        )  # fmt: skip
        self.weights = Weights(self.daemon, f"{self.engine_id}/{self._epoch}", log.info)
        self.adapters = Adapters()
        self.updates = Updates(self.weights, SGLANG)
        self.cached_since = 1
        """No older step has computed what the prefix cache has."""
        self.idle = Idle()
        self.numbers = itertools.count(1)
        """Of requests. The first rank gives them."""
        self.queue: Any = None
        """SGLang's of requests that nothing has been done for, once it is made; it has the cache and the scheduler."""
        self._regions: list[SharedRegion | CudaRegion] = []
        """Memory of the daemon, a region for each pool of the cache."""
        self._stream: Any = None
        """The CUDA stream on which the last step was launched: a pipeline's is not the scheduler's."""
        log.info("rank %d of %d of %s is attached to the daemon on %s", self.number, self.count, self.engine_id, path)

    def place(self, create: Callable[[Any], None], pool: Any, device: str) -> None:
        """Let the pool's `create` allocate in the daemon's memory; a stage of a pipeline may have no layers of a kind.
        Raises KvferryError."""
        if buffers := buffers_of(partial(create, copy(pool))):
            # `create` may make small tables besides, which lie there too on a GPU.
            nbytes = region_nbytes([*buffers, torch.empty(1)], torch.device(device).type)
            self._regions.append(self.daemon.allocate(nbytes, len(self._regions)))
        with placed(self._regions[-1], buffers) if buffers else nullcontext():
            create(pool)

    def register(self, arguments: ServerArgs, cache_dtype: str) -> None:
        """Describe the cache to the daemon. cache_dtype: SGLang's name of its type. Raises KvferryError."""
        if not self._regions:
            raise unsupported("a cache that is neither MHATokenToKVPool nor MLATokenToKVPool")
        model = ModelConfig.from_server_args(arguments)
        seed = arguments.random_seed if arguments.load_format == "dummy" else None
        text = _configuration(model, arguments)
        # SGLang turns all keys of a batch by the factors for long contexts where one of them is.
        config = text | scales(cache_dtype, get_model().quantization_param_path)
        config |= turned(text, model.context_len, "long beside a long one")
        known = config, str(model.dtype), model.quantization
        first: dict[str, Any] = {"name": model.model_path, "revision": model.revision, "seed": seed}
        first["kept_in"] = arguments.download_dir
        fingerprint = self.options.fingerprint or model_fingerprint(*known, **first)
        self._checkpoint, self._revision = partial(checkpoint_name, *known), model.revision
        self.weights.registered = self._named(**first)
        builder = ManifestBuilder(
            self.engine_id, self._epoch, ModelInfo(name=model.model_path, fingerprint=fingerprint), rank=self.number,
            world_size=self.count, parallel={"tp": self._tp, "pp": self.count // self._tp},
        )  # fmt: skip
        for at, region in enumerate(self._regions):
            builder.region(at, region.kind, nbytes=region.nbytes, address=region.address)
        cache, window = self.queue.token_to_kv_pool, 1 + (self.queue.scheduler.sliding_window_size or 0)
        self.encoding = describe(
            builder, cache, window, self.number % self._tp, self._tp, _heads(model), cache_dtype, self._draft(arguments)
        )
        if self.on_gpu:
            self.daemon.open_fences(torch.cuda.current_device())
        for note in self.daemon.register(builder.build()):
            log.warning("%s", note)

    def _draft(self, arguments: ServerArgs) -> tuple[Any, Callable[[int], int]] | None:
        """A draft model's cache, and its heads; None where there is none, as at all stages of a pipeline but the
        last."""
        if (pool := self.queue.draft_token_to_kv_pool) is None:
            return None
        spec = get_spec()
        model = ModelConfig.from_server_args(
            arguments, model_path=spec.speculative_draft_model_path,
            model_revision=spec.speculative_draft_model_revision, is_draft_model=True,
        )  # fmt: skip
        return pool, _heads(model)

    def reloaded(self, folder: str) -> None:
        """The weights are those of this checkpoint by now."""
        # SGLang reads it by the revision that it was started with, from where it keeps all downloads.
        self.weights.reloaded(self._named(name=folder, revision=self._revision))

    def _named(self, **checkpoint: Any) -> str:
        """A checkpoint's name; none where its files are not laid out as they are known to be."""
        try:
            return self._checkpoint(**checkpoint)
        except KvferryError as error:
            log.warning("the checkpoint has no name: %s", error)
            return ""

    @property
    def on_gpu(self) -> bool:
        return any(isinstance(region, CudaRegion) for region in self._regions)

    def written(self) -> Fence | None:
        """A fence behind all that was computed until now: to publish after."""
        return self.daemon.written(self._stream or torch.cuda.current_stream()) if self.on_gpu else None

    def begin_step(self) -> None:
        """A batch is about to be launched, on the stream that is current."""
        self.weights.step, self._stream = self.weights.step + 1, torch.cuda.current_stream() if self.on_gpu else None


def _heads(model: ModelConfig) -> Callable[[int], int]:
    """How many KV heads a layer has: those with sliding windows may have another number."""
    windowed = frozenset(model.swa_attention_layer_ids or ())
    everywhere, in_windows = model.get_total_num_kv_heads(), model.get_swa_num_kv_heads(1)
    return lambda layer: in_windows if layer in windowed else everywhere


def _configuration(model: ModelConfig, arguments: ServerArgs) -> dict[str, Any]:
    """The text model's, as other engines read it: SGLang adds fields to the one that it works with."""
    try:
        config = AutoConfig.from_pretrained(
            model.model_path, revision=model.revision or "main", trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError):  # a model that only SGLang knows
        return dict(model.hf_text_config.to_dict())
    return {**config.get_text_config().to_dict(), **json.loads(arguments.json_model_override_args)}


this_rank = cache(Rank)
"""The rank of this process. Raises KvferryError."""


def chosen() -> bool:
    """Whether this engine is one side of a pair that kvferry serves."""
    disagg = get_disagg()
    return bool(disagg.disaggregation_mode != "null" and disagg.disaggregation_transfer_backend == BACKEND)


def unsupported(what: str) -> Malformed:
    remedy = "start the engine without it: docs/sglang.md lists what is supported"
    return Malformed("unsupported_engine", f"kvferry does not carry {what}", field="sglang", value=what, remedy=remedy)
