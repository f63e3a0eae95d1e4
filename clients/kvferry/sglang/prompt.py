"""What a request's KV depends on: its sender and its receiver are bound to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.digest import prompt_digest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True, slots=True)
class Prompt:
    num_tokens: int
    digest: bytes

    @classmethod
    def of(cls, req: Req) -> Prompt:
        """In SGLang's token ids an image, a sound or a video is there by a hash of its content."""
        return cls(len(req.origin_input_ids), prompt_digest(req.origin_input_ids, _extras(req)))


def _extras(req: Req) -> Iterator[str]:
    if req.lora_id is not None:
        yield f"lora={req.lora_id}"
    if req.input_embeds is not None:
        yield f"embeds={hashlib.sha256(np.asarray(req.input_embeds, np.float32).tobytes()).hexdigest()}"
