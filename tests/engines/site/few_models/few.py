from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.minicpm3 import MiniCPM3ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.speculative.draft_utils import DraftBackendFactory


class Gemma3OfTwoPools(Gemma3ForCausalLM):
    """SGLang keeps the windows of Gemma 3 in the pool of the other layers, by this class's name."""


EntryClass = [
    LlamaForCausalLM, LlamaForCausalLMEagle, Gemma3ForCausalLM, Gemma3OfTwoPools, MiniCPM3ForCausalLM, Qwen3ForCausalLM,
]  # fmt: skip

# DP attention pads with it. Of SGLang's attention on CPUs only that of AMX has one.
TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def _in_its_pool(run: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's attention of torch writes a window's layer at the slots of its pool, and reads it at those of the other
    one: let it read where it writes. A slot that the pool has given up is 0 there, and the window's mask hides it."""

    def read(
        self: Any, query: Any, output: Any, keys: Any, values: Any, slots: Any, rows: Any, *rest: Any, **more: Any
    ) -> Any:
        if self.use_sliding_window_kv_pool and any(keys is each for each in self.token_to_kv_pool.swa_kv_pool.k_buffer):
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots[rows].long())
            rows = torch.arange(len(rows))
        return run(self, query, output, keys, values, slots, rows, *rest, **more)

    return read


for each in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
    setattr(TorchNativeAttnBackend, each, _in_its_pool(getattr(TorchNativeAttnBackend, each)))


def _verified(extend: Callable[..., Any]) -> Callable[..., Any]:
    """Tokens that were guessed come after what each request has, one behind the other: SGLang's attention of torch is
    not told so."""

    def read(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        if batch.forward_mode.is_target_verify():
            batch, guessed = copy(batch), torch.full_like(batch.seq_lens, batch.spec_info.draft_token_num)
            batch.extend_prefix_lens, batch.extend_seq_lens = batch.seq_lens, guessed
            batch.seq_lens = batch.seq_lens + guessed
        return extend(self, q, k, v, layer, batch, save_kv_cache)

    return read


TorchNativeAttnBackend.forward_extend = _verified(TorchNativeAttnBackend.forward_extend)
DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(self.draft_model_runner)
