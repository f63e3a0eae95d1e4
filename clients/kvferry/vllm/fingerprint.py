"""Whether two engines serve the same model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.reference.config import sample_weights
from kvferry.vllm.options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OF_THE_FILE = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}
"""Fields about the configuration file, not about the model."""


def fingerprint(config: VllmConfig, options: Options) -> str:
    """Equal for engines whose KV can be exchanged, whatever path, version, backend or parallelism they have."""
    if options.fingerprint:
        return options.fingerprint
    model, load = config.model_config, config.load_config
    fields = {name: value for name, value in model.hf_text_config.to_dict().items() if name not in OF_THE_FILE}
    fields |= {"computed_in": [str(model.dtype), model.quantization]}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    folder = Path(model.model)
    if load.load_format == "dummy":
        digest.update(f"seed {model.seed}".encode())
    elif any(folder.glob("*.safetensors")):
        sample_weights(folder, digest)
    else:
        digest.update(f"{model.model}@{model.revision}".encode())
    return digest.hexdigest()[:32]
