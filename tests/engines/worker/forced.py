"""A request can name its first token: so one engine computes a prompt's last token alone, as a decode engine does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    import torch


class Forced(AdapterLogitsProcessor):
    """`vllm_xargs`: {"first": token}."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        first = (params.extra_args or {}).get("first")
        if first is None:
            return None

        def choose(sampled: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not sampled:
                chosen = logits[first].clone()
                logits.fill_(float("-inf"))
                logits[first] = chosen
            return logits

        return choose
