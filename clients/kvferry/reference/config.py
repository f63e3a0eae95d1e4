"""The model that is served (ModelConfig, ModelSource), how (EngineConfig), and whether two engines serve the same. No
torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from kvferry.errors import KvferryError, Malformed

_NAMES = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings", "tied": "tie_word_embeddings", "window": "sliding_window",
    "dtype": "kvferry_dtype",
}  # fmt: skip
"""Our names and those of config.json, where they differ."""
LAYOUTS = {
    "NHD": "layer kv block slot head dim",
    "HND": "layer kv block head slot dim",
    "interleaved": "layer block slot kv head dim",
    "cross_layer": "block layer kv head slot dim",
}
"""Outermost first. Any other order of the six axes is as good: `--layout "block head layer kv slot dim"`."""
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_SAMPLES, _SAMPLE_NBYTES = 64, 4096
_TENSORS, _HEADER_NBYTES = 1024, 100 << 20


@dataclass(
    frozen=True, config=ConfigDict(alias_generator=lambda name: _NAMES.get(name, name), populate_by_name=True)
)  # fmt: skip
class ModelConfig:
    """A Llama-style decoder.

    `sliding`: one flag per layer; a sliding layer looks back over `window` tokens, its own included.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]  # even, for RoPE
    vocab_size: PositiveInt
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: PositiveInt = 4096
    tied: bool = False
    window: PositiveInt | None = None
    sliding: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise _unsupported("num_attention_heads", self.num_heads, f"a multiple of {self.num_kv_heads} KV heads")
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
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        for field, value, served in (
            ("architectures", (data.get("architectures") or [None])[0], (None, *_ARCHITECTURES)),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
            ("attention_bias", data.get("attention_bias"), (None, False)),
            ("mlp_bias", data.get("mlp_bias"), (None, False)),
            ("hidden_act", data.get("hidden_act", "silu"), ("silu",)),
        ):  # fmt: skip
            if value not in served:
                raise _unsupported(field, value, " or ".join(str(each) for each in served if each is not None))
        heads, eos = data["num_attention_heads"], data.get("eos_token_id")
        derived = {"num_key_value_heads": heads, "head_dim": data["hidden_size"] // heads}
        # Some of our own names mean something else there: `dtype` is what the weights are stored in.
        given = {name: value for name, value in {**data, **rope}.items() if value is not None and name not in _NAMES}
        given |= {"sliding": [kind == "sliding_attention" for kind in data.get("layer_types") or ()]}
        given |= {"sliding_window": data.get("sliding_window") or None}
        given |= {"eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos]}
        try:
            return cls(**derived | given)
        except ValidationError as error:
            first = error.errors()[0]
            raise _unsupported(str(first["loc"][0]), first["input"], first["msg"]) from None

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` reads back; other software reads all of it but `kvferry_dtype`."""
        fields = TypeAdapter(ModelConfig).dump_python(self, by_alias=True, exclude={"sliding", "eos_token_ids"})
        return dict(fields) | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in self.sliding],
            "eos_token_id": list(self.eos_token_ids) or None,
        }  # fmt: skip


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
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unsupported(str(path), repr(error), "a config.json with every field of a Llama model") from None


def _unsupported(field: str, value: object, wanted: str) -> KvferryError:
    what = "the reference engine cannot serve this model"
    return Malformed("unsupported_model", what, field=field, value=value, remedy=f"it takes {wanted}")


@dataclass(frozen=True)
class ModelSource:
    """The origin of weights: a checkpoint folder, or `seed` for random ones of the same shape."""

    config: ModelConfig
    checkpoint: Path | None = None
    seed: int = 0
    name: str = "reference"

    def fingerprint(self) -> str:
        """Equal for engines whose KV can be exchanged: the configuration, and the seed or a sample of the weights."""
        digest = hashlib.sha256(json.dumps(self.config.to_hf(), sort_keys=True).encode())
        if self.checkpoint is None:
            digest.update(f"seed {self.seed}".encode())
        else:
            sample_weights(self.checkpoint, digest)
        return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder. Raises KvferryError (`malformed_checkpoint`)."""
    index, whole = folder / "model.safetensors.index.json", "model.safetensors"
    others = [] if (folder / whole).exists() else [each.name for each in folder.glob("*.safetensors")]
    try:
        held = json.loads(index.read_text())["weight_map"].values() if index.exists() else others or [whole]
        files = [folder / Path(str(name)).name for name in sorted(set(held))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Malformed("malformed_checkpoint", f"{index} is not a safetensors index: {error}") from None
    if missing := [file for file in files if not file.is_file()]:
        remedy = "a checkpoint folder holds config.json and model.safetensors, or its shards and their index"
        raise Malformed("malformed_checkpoint", f"{missing[0]} is missing", remedy=remedy)
    return files


def sample_weights(folder: Path, digest: hashlib._Hash) -> None:
    """Feed a sample of a checkpoint folder's weights: reading 100 GB twice at start is no good trade, so it is 64 pages
    of each file, its header among them, and the first page of every tensor, as norms and biases are small. A file with
    more than 1024 tensors feeds those with the fewest axes. Raises KvferryError (`malformed_checkpoint`)."""
    for path in weight_files(folder):
        nbytes = path.stat().st_size
        digest.update(f"{path.name} {nbytes}".encode())
        try:
            with path.open("rb") as file:
                for i in range(_SAMPLES):
                    file.seek(i * max(0, nbytes - _SAMPLE_NBYTES) // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_NBYTES))
                file.seek(0)
                begin = 8 + int.from_bytes(file.read(8), "little")
                if begin > min(nbytes, _HEADER_NBYTES):
                    raise ValueError(f"a header of {begin} bytes")
                header = json.loads(file.read(begin - 8))
                tensors = [
                    (len(each["shape"]), name, *each["data_offsets"])
                    for name, each in header.items()
                    if name != "__metadata__"
                ]
                for _, name, start, stop in sorted(tensors)[:_TENSORS]:
                    file.seek(begin + start)
                    digest.update(name.encode() + file.read(max(0, min(stop - start, _SAMPLE_NBYTES))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Malformed("malformed_checkpoint", f"{path} is no safetensors file: {error}") from None


class EngineConfig(BaseModel):
    """How the model is served. Sizes in tokens or blocks as named, times in seconds. Described fields are flags."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="forbid")

    engine_id: str = Field(default="reference", description="names this engine to routers and daemons")
    tp: PositiveInt = Field(default=1, description="ranks, one process each; need not divide the KV heads")
    fingerprint: str = Field(default="", description="what both sides must have in common; without: of the model")
    layout: str = Field(default="NHD", description=f"order of the cache's axes: {', '.join(LAYOUTS)}, or spelled out")
    block_size: PositiveInt = Field(default=16, description="tokens in a block")
    num_blocks: PositiveInt = Field(default=512, description="blocks in the cache")
    max_tokens_per_step: PositiveInt = Field(default=128, description="prefill chunk")
    max_requests: PositiveInt = Field(default=16, description="requests that run at once")
    max_waiting: PositiveInt = 1024
    prefix_cache: bool = Field(default=True, description="find the blocks of known prefixes again")
    progressive: bool = Field(
        default=True, description="publish a prefill chunk by chunk, so that decode reads while prefill computes"
    )
    on_load_failure: Literal["fail", "recompute"] = Field(
        default="fail", description="when KV does not arrive: answer 502, or prefill here"
    )
    daemons: tuple[str, ...] = Field(
        default=(), alias="daemon", examples=["SOCKET"],
        description="engine socket of a rank's daemon, once per rank, in rank order; without: no transfers",
    )  # fmt: skip
    start_timeout_s: PositiveFloat = Field(default=120.0, description="until every worker must be ready")
    step_timeout_s: PositiveFloat = Field(default=60.0, description="a worker that takes longer for a step has failed")
    request_timeout_s: PositiveFloat = Field(default=300.0, description="a request's whole life")
    load_timeout_s: PositiveFloat = Field(default=60.0, description="until the KV of a request must have arrived")
    daemon_timeout_s: PositiveFloat = Field(default=10.0, description="a daemon's answer to one call")
    lease_ttl_s: float = Field(
        default=0.0, ge=0, description="how long published KV waits for a reader; 0: as the daemon is configured"
    )

    @model_validator(mode="after")
    def _one_daemon_per_rank(self) -> EngineConfig:
        if self.daemons and len(self.daemons) != self.tp:
            what = f"{len(self.daemons)} daemons for {self.tp} ranks"
            raise ValueError(f"{what}: give --daemon once per rank, in rank order, or not at all")
        return self
