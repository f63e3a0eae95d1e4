"""A request's word about its KV: its number, what it depends on and, where another kind of engine has prefilled, where
it is.

SGLang's requests have one place for what SGLang does not know, `custom_params` of their sampling parameters. It takes
no object within an object, so that kv_transfer_params are there as JSON text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput

from kvferry.digest import prompt_digest
from kvferry.errors import Malformed
from kvferry.handoff import PARAMS, Handoff, Origin
from kvferry.weights import Adapters

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

HOST, PORT = "handed-over", 0
ADDRESS = f"{HOST}:{PORT}"
"""Stands for the bootstrap address of a request that another kind of engine has prefilled."""
NUMBER = "kvferry_number"
"""A request's number, among its custom parameters; a client's own is replaced."""
ROOMS = range(1, 1 << 63)
"""SGLang takes room 0 for that of a request whose rows have not come yet."""


def lease_of(room: int | None) -> str:
    """The request id by which daemons know what SGLang calls a bootstrap room. Raises KvferryError
    (`unsupported_request`) for one that SGLang's rows cannot hold, which would end its scheduler."""
    if not isinstance(room, int) or room not in ROOMS:  # `in` would compare None with every number
        why, remedy = "SGLang has no such bootstrap_room", f"send a number from {ROOMS.start} to {ROOMS.stop - 1}"
        raise Malformed("unsupported_request", why, field="bootstrap_room", value=room, remedy=remedy)
    return f"room-{room}"


@dataclass(frozen=True, slots=True)
class Prompt:
    num_tokens: int
    digest: bytes

    @classmethod
    def of(cls, req: Req, adapters: Adapters) -> Prompt:
        """In SGLang's token ids an image, a sound or a video is there by a hash of its content. adapters: those that
        this process has loaded, by SGLang's ids of them."""
        return cls(len(req.origin_input_ids), prompt_digest(req.origin_input_ids, _extras(req, adapters)))


def number(said: Iterable[object], numbers: Iterator[int]) -> None:
    """Give each request a number, which is that of its attempt at decode, and of its lease at prefill. The first rank
    does so before it broadcasts them: a request has one number on all ranks."""
    for each in said:
        for request in each if isinstance(each, BatchTokenizedGenerateReqInput) else (each,):
            if isinstance(request, TokenizedGenerateReqInput):
                params = request.sampling_params
                params.custom_params = {**(params.custom_params or {}), NUMBER: next(numbers)}


def number_of(req: Req) -> int:
    """The number that the first rank has given it."""
    return int(req.sampling_params.custom_params[NUMBER])


def _extras(req: Req, adapters: Adapters) -> Iterator[str]:
    if req.lora_id is not None:
        yield f"lora={adapters.digest(req.lora_id, req.lora_id)}"
    if req.input_embeds is not None:
        yield f"embeds={_hashed(req.input_embeds)}"
    if (placed := req.positional_embed_overrides) is not None:
        yield f"placed={','.join(map(str, placed.positions))}={_hashed(placed.embeds.float().cpu())}"


def _hashed(rows: object) -> str:
    return hashlib.sha256(np.asarray(rows, np.float32).tobytes()).hexdigest()


def handed_over(req: Req, prompt: Prompt) -> tuple[Origin, int]:
    """The place of KV that another kind of engine has computed, and the first token.

    Raises KvferryError: `malformed_kv_transfer_params`, `other_prompt`, `unsupported_request`.
    """
    handoff = Handoff.parse((req.sampling_params.custom_params or {}).get(PARAMS, "{}"), json=True)
    origin = handoff.origin(req.rid, prompt.num_tokens, lambda _: prompt.digest)
    token = handoff.remote_first_token
    needed = {
        f"a bootstrap_host, or {PARAMS} that name a source": origin is not None,
        "remote_first_token, below the vocabulary's size": token is not None and token < (req.vocab_size or 0),
        "remote_num_tokens of the whole prompt": origin is not None and origin.num_tokens == prompt.num_tokens,
        "neither return_logprob nor return_sampling_mask": not (req.return_logprob or req.return_sampling_mask),
    }
    for what, there in needed.items():
        if not there:
            remedy = 'docs/sglang.md, "From another engine", has the whole request'
            raise Malformed("unsupported_request", f"SGLang needs {what}", remedy=remedy)
    assert origin is not None and token is not None
    return origin, token
