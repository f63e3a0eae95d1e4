from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.minicpm3 import MiniCPM3ForCausalLM

EntryClass = [LlamaForCausalLM, Gemma3ForCausalLM, MiniCPM3ForCausalLM]
