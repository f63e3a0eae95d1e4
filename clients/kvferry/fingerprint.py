"""The fingerprint of a model: by it two engines know that their KV can be exchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kvferry.reference.config import sample_tensors, sample_weights

OF_THE_FILE = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}
"""Fields about the configuration file, not about the model."""


def model_fingerprint(
    config: Mapping[str, object], dtype: str, quantization: str | None, *, name: str, revision: str | None,
    seed: int | None = None,
) -> str:  # fmt: skip
    """Equal for engines whose KV can be exchanged, whatever path, version, backend or parallelism they have.

    config: the text model's, as transformers has it. dtype: of the computation, as torch prints it. name: the
    checkpoint's folder, or its name elsewhere. seed: of random weights.
    """
    fields: dict[str, object] = {field: value for field, value in config.items() if field not in OF_THE_FILE}
    fields |= {"computed_in": [dtype, quantization]}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    if seed is not None:
        digest.update(f"seed {seed}".encode())
    elif any(Path(name).glob("*.safetensors")):
        sample_weights(Path(name), digest)
    else:
        digest.update(f"{name}@{revision}".encode())
    return digest.hexdigest()[:32]


def checkpoint_name(
    config: Mapping[str, object], dtype: str, quantization: str | None, *, name: str, revision: str | None,
    seed: int | None = None,
) -> str:  # fmt: skip
    """The name of the weights that an engine reads from a checkpoint while it serves: a fingerprint to which every
    tensor adds something. Empty where nothing is known of the content: files of the same name may have another.

    Raises KvferryError (`malformed_checkpoint`).
    """
    fingerprint = model_fingerprint(config, dtype, quantization, name=name, revision=revision, seed=seed)
    if seed is not None:
        return fingerprint
    if not any(Path(name).glob("*.safetensors")):
        return ""
    digest = hashlib.sha256(fingerprint.encode())
    sample_tensors(Path(name), digest)
    return digest.hexdigest()[:32]
