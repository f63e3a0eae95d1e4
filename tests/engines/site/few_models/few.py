from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.minicpm3 import MiniCPM3ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class Gemma3OfTwoPools(Gemma3ForCausalLM):
    """SGLang keeps the windows of Gemma 3 in the pool of the other layers, by this class's name."""


EntryClass = [LlamaForCausalLM, Gemma3ForCausalLM, Gemma3OfTwoPools, MiniCPM3ForCausalLM, Qwen3ForCausalLM]

# DP attention pads with it. Of SGLang's attention on CPUs only that of AMX has one.
TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
