"""What is served (ModelConfig) and how (EngineConfig)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry.errors import KvferryError, Malformed

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-style decoder, by the names of Hugging Face's config.json.

    `sliding`: one flag per layer; a sliding layer looks back over `window` tokens, its own included.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 4096
    tied: bool = False
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise _unsupported(name, getattr(self, name), "a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise _unsupported("num_attention_heads", self.num_heads, f"a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise _unsupported("head_dim", self.head_dim, "an even number, for RoPE")
        if self.dtype not in DTYPES:
            raise _unsupported("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if not self.sliding:
            object.__setattr__(self, "sliding", (self.window is not None,) * self.num_layers)
        if len(self.sliding) != self.num_layers or (any(self.sliding) and not self.window):
            raise _unsupported("layer_types", self.sliding, "one entry per layer, and sliding_window with sliding ones")

    def group_of(self, layer: int) -> str:
        """The KV-cache group of a layer."""
        return "window" if self.sliding[layer] else "full"

    @property
    def groups(self) -> dict[str, int | None]:
        """Window (tokens) by KV-cache group, in the order in which block ids are listed to peers."""
        windows: dict[str, int | None] = {"full": None, "window": self.window}
        return {group: windows[group] for group in sorted({self.group_of(layer) for layer in range(self.num_layers)})}

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> ModelConfig:
        """From the parsed config.json. Raises KvferryError (`unsupported_model`) for what the model lacks."""
        if (architecture := (data.get("architectures") or ["LlamaForCausalLM"])[0]) not in _ARCHITECTURES:
            raise _unsupported("architectures", architecture, f"one of {', '.join(_ARCHITECTURES)}")
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if (rope_type := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise _unsupported("rope_type", rope_type, "default")
        for name in ("attention_bias", "mlp_bias"):
            if data.get(name):
                raise _unsupported(name, True, "false")
        if (act := data.get("hidden_act", "silu")) != "silu":
            raise _unsupported("hidden_act", act, "silu")
        fields = {name: data[theirs] for name, theirs in _NAMES.items() if data.get(theirs) is not None}
        heads, eos = data["num_attention_heads"], data.get("eos_token_id")
        derived = {"num_kv_heads": heads, "head_dim": data["hidden_size"] // heads}
        fields |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        fields |= {name: float(fields[name]) for name in ("rope_theta", "rms_norm_eps") if name in fields}
        return cls(
            **derived | fields | {"window": data.get("sliding_window") or None},
            sliding=tuple(kind == "sliding_attention" for kind in data.get("layer_types") or ()),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` reads back; other software reads all of it but `kvferry_dtype`."""
        return {name: getattr(self, ours) for ours, name in _NAMES.items()} | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in self.sliding],
            "eos_token_id": list(self.eos_token_ids) or None,
        }  # fmt: skip


_NAMES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "vocab_size": "vocab_size", "rms_norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "max_positions": "max_position_embeddings", "tied": "tie_word_embeddings", "window": "sliding_window",
    "dtype": "kvferry_dtype",
}  # fmt: skip
"""Our names and those of config.json."""
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

PRESETS = {
    "demo": ModelConfig(
        num_layers=4, hidden_size=384, intermediate_size=1024, num_heads=12, num_kv_heads=6, head_dim=32, vocab_size=512
    ),
    "tiny": ModelConfig(
        num_layers=2, hidden_size=96, intermediate_size=160, num_heads=6, num_kv_heads=3, head_dim=16, vocab_size=300
    ),
}  # fmt: skip


def read_model_config(path: Path) -> ModelConfig:
    """From a config.json. Raises KvferryError (`unsupported_model`) for an unreadable or unsupported one."""
    try:
        return ModelConfig.from_hf(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise _unsupported(str(path), error, "a readable config.json") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _unsupported(str(path), repr(error), "a config.json with every field of a Llama model") from None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where weights come from: a checkpoint folder, or `seed` for random ones of the same shape."""

    config: ModelConfig
    checkpoint: Path | None = None
    seed: int = 0
    name: str = "reference"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the model is served. Sizes in tokens or blocks as named, times in seconds.

    daemons: the engine socket of one daemon per rank; empty for a standalone engine with private memory.
    lease_ttl_s: 0 for the daemon's default.
    """

    engine_id: str = "reference"
    tp: int = 1
    layout: str = "NHD"
    block_size: int = 16
    num_blocks: int = 512
    max_step_tokens: int = 128
    max_requests: int = 16
    max_waiting: int = 1024
    prefix_cache: bool = True
    progressive: bool = True
    on_load_failure: Literal["fail", "recompute"] = "fail"
    daemons: tuple[str, ...] = ()
    start_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    request_timeout_s: float = 300.0
    load_timeout_s: float = 60.0
    daemon_timeout_s: float = 10.0
    lease_ttl_s: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise Malformed("bad_option", f"{field.name} must be 1 or more", field=field.name, value=value)
        if self.daemons and len(self.daemons) != self.tp:
            raise Malformed(
                "bad_option", f"{len(self.daemons)} daemons for {self.tp} ranks", field="daemon", value=self.daemons,
                remedy="give --daemon once per rank, in rank order, or not at all",
            )  # fmt: skip


def _unsupported(field: str, value: object, wanted: str) -> KvferryError:
    what = "the reference engine cannot serve this model"
    return Malformed("unsupported_model", what, field=field, value=value, remedy=f"it takes {wanted}")
