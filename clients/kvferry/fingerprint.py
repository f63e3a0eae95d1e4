"""The fingerprint of a model: by it two engines know that their KV can be exchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.errors import Malformed
from kvferry.reference.config import sample_weights, weight_files

LEFT_OUT = {
    "_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache", "max_model_len"
}  # fmt: skip
"""Fields about the configuration file, not about the model; and one that vLLM's models add (minimax_m2.py)."""


def model_fingerprint(
    config: Mapping[str, object], dtype: str, quantization: str | None, *, name: str, revision: str | None,
    seed: int | None = None, kept_in: str | None = None,
) -> str:  # fmt: skip
    """Equal for engines whose KV can be exchanged, whatever path, version, backend or parallelism they have.

    config: the text model's, as transformers has it. dtype: of the computation, as torch prints it. name: the
    checkpoint's folder, or its name elsewhere, of which `kept_in` has a copy. seed: of random weights. Raises
    KvferryError (`malformed_checkpoint`).
    """
    fields: dict[str, object] = {field: value for field, value in config.items() if field not in LEFT_OUT}
    fields |= {"computed_in": [dtype, quantization]}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    if seed is not None:
        digest.update(f"seed {seed}".encode())
    elif (folder := folder_of(name, revision, kept_in)) and _has_weights(folder, name):
        sample_weights(folder, digest)
    else:
        digest.update(f"{name}@{folder.name if folder and not Path(name).exists() else revision}".encode())
    return digest.hexdigest()[:32]


def checkpoint_name(
    config: Mapping[str, object], dtype: str, quantization: str | None, *, name: str, revision: str | None,
    seed: int | None = None, kept_in: str | None = None,
) -> str:  # fmt: skip
    """The name of the weights that an engine reads from a checkpoint while it serves: their fingerprint. Empty where
    nothing is known of the content: files of the same name may have another.

    Raises KvferryError (`malformed_checkpoint`).
    """
    folder = folder_of(name, revision, kept_in)
    if seed is None and not (folder and _has_weights(folder, name)):
        return ""
    return model_fingerprint(config, dtype, quantization, name=name, revision=revision, seed=seed, kept_in=kept_in)


def _has_weights(folder: Path, name: str) -> bool:
    """Whether safetensors are there. A hub's cache may have a part, which is no use to sample."""
    if not any(folder.glob("*.safetensors")):
        return False
    try:
        weight_files(folder)
    except Malformed:
        return Path(name).expanduser().is_dir()
    return True


def folder_of(name: str, revision: str | None = None, kept_in: str | None = None) -> Path | None:
    """The folder with the files of a checkpoint or an adapter. A name of a hub stands for what its revision (None: the
    main branch) was when it was downloaded, to `kept_in` or where all are kept; None if nothing of it is here."""
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download  # it is there where an engine has downloaded something

        return Path(snapshot_download(name, revision=revision, cache_dir=kept_in, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def turned(config: Mapping[str, Any], longest: float, how: str) -> dict[str, str]:
    """The fingerprint's part of how keys are turned by LongRoPE, which has factors for short contexts and others for
    long ones: the configuration does not say which an engine takes. longest: tokens of a request. how: the rule of an
    engine whose requests may be long; if none is, all engines take the factors for short ones."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # or one for each kind of layer
        if each.get("rope_type", each.get("type")) in ("longrope", "su"):
            short = each.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
            if short is None or longest > short:
                return {"longrope": how}
    return {}
