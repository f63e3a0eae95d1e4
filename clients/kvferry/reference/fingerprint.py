"""Whether two engines serve the same model, without torch and without reading every weight."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvferry.errors import Malformed
from kvferry.reference.config import ModelSource

_SAMPLES, _SAMPLE_NBYTES = 64, 4096


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder. Raises KvferryError (`malformed_checkpoint`)."""
    index = folder / "model.safetensors.index.json"
    try:
        held = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
        files = [folder / Path(str(name)).name for name in sorted(set(held))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Malformed("malformed_checkpoint", f"{index} is not a safetensors index: {error}") from None
    if missing := [file for file in files if not file.is_file()]:
        remedy = "a checkpoint folder holds config.json and model.safetensors, or its shards and their index"
        raise Malformed("malformed_checkpoint", f"{missing[0]} is missing", remedy=remedy)
    return files


def fingerprint(source: ModelSource) -> str:
    """Equal for engines whose KV can be exchanged: the configuration, and the seed or a sample of the weights.

    A sample, because reading 100 GB twice at start is no good trade: 64 pages of each file, its header among them.
    """
    digest = hashlib.sha256(json.dumps(source.config.to_hf(), sort_keys=True).encode())
    if source.checkpoint is None:
        digest.update(f"seed {source.seed}".encode())
    else:
        sample_weights(source.checkpoint, digest)
    return digest.hexdigest()[:32]


def sample_weights(folder: Path, digest: hashlib._Hash) -> None:
    """Feed a sample of a checkpoint folder's weights. Raises KvferryError (`malformed_checkpoint`)."""
    for path in weight_files(folder):
        nbytes = path.stat().st_size
        digest.update(f"{path.name} {nbytes}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(0, nbytes - _SAMPLE_NBYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_NBYTES))
