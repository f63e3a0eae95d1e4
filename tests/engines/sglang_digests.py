"""Print the digests of SGLang requests that differ in one thing each. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_digests.py
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kvferry.sglang.prompt import Prompt
from kvferry.weights import Adapters

TOKENS, ROWS = array("q", range(100, 115)), torch.arange(2 * 8, dtype=torch.bfloat16).view(2, 8)


def request(**more: Any) -> Req:
    return Req("r", "", TOKENS, SamplingParams(max_new_tokens=1), **more)


def main() -> None:
    requests = {
        "text": request(),
        "another tenant's": request(extra_key="another tenant", cache_salt="salt"),
        "embeddings": request(input_embeds=ROWS.float().tolist()),
        "other embeddings": request(input_embeds=(1 + ROWS).float().tolist()),
        "embeddings in places": request(positional_embed_overrides=PositionalEmbeds(ROWS, [3, 5])),
        "other ones there": request(positional_embed_overrides=PositionalEmbeds(1 + ROWS, [3, 5])),
        "in other places": request(positional_embed_overrides=PositionalEmbeds(ROWS, [3, 6])),
    }
    print(json.dumps({name: Prompt.of(one, Adapters()).digest.hex() for name, one in requests.items()}))


if __name__ == "__main__":
    main()
