"""The digest that binds a handover to its prompt. docs/engines.md defines it for engines of any language."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

DOMAIN = b"kvferry/prompt/1\0"


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
