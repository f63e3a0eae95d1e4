"""A request that another kind of engine has prefilled: its kv_transfer_params say where the KV is, and the first token.

SGLang's requests have one place for what SGLang does not know, `custom_params` of their sampling parameters. It takes
no object within an object, so that the kv_transfer_params are there as JSON text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import Conflict, Malformed
from kvferry.handoff import MALFORMED, PARAMS, REMEDY, Handoff, Origin
from kvferry.sglang.prompt import Prompt

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req

UNSUPPORTED = "unsupported_request"
HOST, PORT = "handed-over", 0
ADDRESS = f"{HOST}:{PORT}"
"""Stands for the bootstrap address, which such a request does not have."""
ROOMS = range(1, 1 << 63)
"""SGLang takes room 0 for a request whose rows have not come yet."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    origin: Origin
    first_token: int
    rows: MetadataBuffers

    @classmethod
    def of(cls, req: Req, prompt: Prompt, rows: MetadataBuffers) -> HandedOver:
        """Raises KvferryError: `malformed_kv_transfer_params`, `other_prompt`, `unsupported_request`."""
        field = f"custom_params.{PARAMS}"
        said = (req.sampling_params.custom_params or {}).get(PARAMS)
        if not isinstance(said, str):
            remedy = f"name a bootstrap_host, or send another engine's {PARAMS} as JSON text in {field}"
            raise Malformed(MALFORMED, "it is not known where the KV is", field=field, value=said, remedy=remedy)
        try:
            handoff = Handoff.parse(json.loads(said))
        except (ValueError, RecursionError) as error:
            raise Malformed(MALFORMED, f"{field}: {error}", field=field, value=said, remedy=REMEDY) from None
        origin = handoff.origin(req.rid, prompt.num_tokens, lambda _: prompt.digest)
        token, size = handoff.remote_first_token, req.vocab_size or 0
        if origin is None or token is None or token >= size:
            wanted = f"a source, and a first token below the vocabulary's size, {size}"
            raise Malformed(MALFORMED, f"{field}: expected {wanted}", field=field, value=said, remedy=REMEDY)
        if origin.num_tokens < prompt.num_tokens:
            what = f"{origin.num_tokens} of {prompt.num_tokens} tokens were prefilled, and this engine computes none"
            remedy = "prefill the whole prompt"
            raise Conflict("other_prompt", what, field=f"{field}.remote_num_tokens", remedy=remedy)
        if req.return_logprob or req.return_sampling_mask:
            remedy = "leave return_logprob and return_sampling_mask out, or prefill with SGLang"
            raise Malformed(UNSUPPORTED, "of the first token only its id is handed over", remedy=remedy)
        if req.bootstrap_room not in ROOMS:
            what, remedy = "it cannot be a room", f"a number from {ROOMS.start} to {ROOMS.stop - 1}"
            raise Malformed(UNSUPPORTED, what, field="bootstrap_room", value=req.bootstrap_room, remedy=remedy)
        return cls(origin, token, rows)

    def write(self, index: int, room: int) -> None:
        """Into the request's rows, which are zero, what SGLang looks for when the KV is there."""
        self.rows.output_ids[index, 0] = self.first_token
        self.rows.bootstrap_room[index, 0] = room
