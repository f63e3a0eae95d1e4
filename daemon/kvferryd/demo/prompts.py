"""The demo's prompts: token ids, the same on every run, of lengths that fit neither block size."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 512
"""As the reference engine's preset `demo` has it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """request_id: the client's name for it."""

    request_id: str
    tokens: tuple[int, ...]
    max_tokens: int


def waves(seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """A first wave that warms decode's prefix cache, and a second that shares prefixes with it, all at once."""
    dice = random.Random(seed)  # noqa: S311  # not for secrets

    def some(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(VOCABULARY) for _ in range(count))

    def prompts(name: str, texts: list[tuple[int, ...]]) -> list[Prompt]:
        return [Prompt(f"{name}-{i}", tokens, 9 + i % 5) for i, tokens in enumerate(texts, start=1)]

    short, middle, long = some(61), some(173), some(331)
    first = prompts("warm", [short, middle, long])
    second = prompts(
        "demo",
        [
            short + some(5),
            middle + some(9),
            long + some(40),
            long[:205] + some(77),
            middle,  # decode holds all of it but the last, partly filled block
            some(5),
            some(17),
            some(98),
            some(259),
            some(397),
        ],
    )
    return first, second
