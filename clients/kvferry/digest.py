"""The digest that binds a handover to its prompt. docs/engines.md defines it for engines of any language."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

V = TypeVar("V")
DOMAIN = b"kvferry/prompt/1\0"
REMEMBERED = 8192
"""Requests about which an engine keeps something: more than a daemon remembers (its `history`)."""


def prompt_digest(tokens: Sequence[int], extras: Iterable[str] = ()) -> bytes:
    """SHA-256 of the token ids whose KV is published, and of all else that their KV depends on.

    tokens: the first `num_tokens` of the request, generated ones included. extras: for example the name of a LoRA
    adapter; none for text on the bare model.
    """
    ids = np.asarray(tokens, dtype="<i8")
    digest = hashlib.sha256(DOMAIN + len(ids).to_bytes(8, "little") + ids.tobytes())
    for extra in extras:
        encoded = extra.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


class Remembered(OrderedDict[str, V]):
    """Something about each of the last requests, by request id."""

    def __setitem__(self, request_id: str, value: V) -> None:
        super().__setitem__(request_id, value)
        self.move_to_end(request_id)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


class Attempts:
    """Numbers the attempts at each request that is read from another engine, so that all ranks give one number."""

    def __init__(self) -> None:
        self._begun: Remembered[int] = Remembered()

    def next(self, request_id: str) -> int:
        """1 the first time. The requests that were tried the longest ago are forgotten."""
        attempt = self._begun[request_id] = self._begun.get(request_id, 0) + 1
        return attempt
