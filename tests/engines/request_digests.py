"""Print the digests of vLLM requests that differ in one thing each. Run by the Python that vLLM is installed for.

.venv-engines/bin/python tests/engines/request_digests.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.vllm.identity import digest_of

TOKENS = list(range(100, 120))


def image(
    identifier: str, offset: int = 4, length: int = 6, content: float | None = None
) -> MultiModalFeatureSpec:  # fmt: skip
    held = None
    if content is not None:
        pixels = MultiModalFieldElem(torch.full((2, 3), content), MultiModalSharedField(batch_size=1))
        held = MultiModalKwargsItem({"pixel_values": pixels})
    return MultiModalFeatureSpec(held, "image", identifier, PlaceholderRange(offset, length))


def request(tokens: list[int] | None = TOKENS, **more: object) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **more)


def adapter(name: str, folder: str, content: bytes) -> LoRARequest:
    path = Path(sys.argv[1], folder)
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest(name, 1, str(path))


def main() -> None:
    rows = torch.arange(20 * 8, dtype=torch.float32).view(20, 8)
    other_rows = rows.clone()
    other_rows[3, 0] += 1
    requests = {
        "text": request(),
        "another name": request(cache_salt="another tenant"),
        "image": request(mm_features=[image("cat")]),
        "another image": request(mm_features=[image("dog")]),
        "an image elsewhere": request(mm_features=[image("cat", 5)]),
        "a longer image": request(mm_features=[image("cat", length=7)]),
        "an image after these tokens": request(mm_features=[image("cat", 15, 5)]),
        "two images": request(mm_features=[image("cat"), image("dog", 11, 3)]),
        "adapter": request(lora_request=adapter("one", "here", b"one")),
        "another adapter": request(lora_request=adapter("one", "there", b"two")),
        "the adapter from elsewhere": request(lora_request=adapter("another name", "elsewhere", b"one")),
        "embeddings": request(None, prompt_embeds=rows),
        "other embeddings": request(None, prompt_embeds=other_rows),
    }
    # Names of images are vLLM's count, which begins anew with each engine.
    counted = {
        "counted": image("renderer0-mm-1-image-0", content=1.0), "counted otherwise": image("2", content=1.0),
        "another of that count": image("renderer0-mm-1-image-0", content=2.0),
        "whose content is not here": image("renderer0-mm-1-image-0"),
        "whose content is not here, either": image("renderer0-mm-1-image-0"),
    }  # fmt: skip
    digests = {name: digest_of(one, 15) for name, one in requests.items()}
    digests |= {name: digest_of(request(mm_features=[one]), 15, named=False) for name, one in counted.items()}
    print(json.dumps({name: digest.hex() for name, digest in digests.items()}))


if __name__ == "__main__":
    main()
