"""A handover is bound to its prompt, by a digest that docs/engines.md defines for engines of any language, and to the
weights that computed it, by their name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.errors import Malformed

DOMAIN = b"kvferry/prompt/1\0"
MAX_WEIGHTS = 256
"""Characters of the name of weights."""


def prompt_digest(tokens: Sequence[int], extras: Iterable[str] = ()) -> bytes:
    """SHA-256 of the token ids whose KV is published, and of all else that their KV depends on.

    tokens: the first `num_tokens` of the request, generated ones included. extras: for example the name of a LoRA
    adapter; none for text on the bare model.
    """
    ids = np.fromiter(tokens, "<i8", len(tokens))  # a third of asarray's time
    digest = hashlib.sha256(DOMAIN + len(ids).to_bytes(8, "little") + ids.tobytes())
    for extra in extras:
        encoded = extra.encode(errors="surrogatepass")  # a name from a JSON body may hold half a character
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def check_weights(weights: str) -> None:
    """The name is no longer than it may be; empty for the weights that an engine registered with. Raises KvferryError
    (`malformed_weights`)."""
    if (length := len(weights)) > MAX_WEIGHTS:
        why, remedy = "the name of the weights is too long", f"at most {MAX_WEIGHTS} characters, for example a version"
        raise Malformed("malformed_weights", why, field="weights", value=f"{length} characters", remedy=remedy)
