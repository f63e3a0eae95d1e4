from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.minicpm3 import MiniCPM3ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

EntryClass = [LlamaForCausalLM, Gemma3ForCausalLM, MiniCPM3ForCausalLM, Qwen3ForCausalLM]

# DP attention pads with it. Of SGLang's attention on CPUs only that of AMX has one.
TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
