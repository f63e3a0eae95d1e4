"""Why two sides cannot be paired, as it is told: in a transfer's record, in logs, at the command line, on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvferry.errors import Malformed, Refusal, shorten

MEANING = {
    "fingerprint": ("they serve different models", "start both engines with the same weights, heads and dtype"),
    "encoding": ("the bytes mean different things", "start both engines with the same KV-cache dtype"),
    "divided": (
        "it is only moved whole, and would be divided or laid out otherwise",
        "start both engines with the same parallelism, block size and layout, or with another KV-cache dtype",
    ),
    "dtype": ("the element types differ", "give both engines the same KV-cache dtype"),
    "missing_component": (
        "no source rank lists it",
        "give the manifests of all ranks; serve the same model on both sides, its draft included",
    ),
    "inner_extent": ("an axis that is not sharded has another length", "the engines must serve the same model"),
    "total": ("the sharded axis has another length over all ranks", "the engines must serve the same model"),
    "axes": ("the axes are not the same", "name the axes alike on both sides; their order is free"),
    "group_kind": ("one side pages it by tokens, the other holds it as a state", "use the same kind of group"),
    "token_shard": ("the source ranks share out tokens in different ways", "one size and interleave for all ranks"),
    "uncovered": ("no set of source ranks holds all of it", "give the manifests of all source ranks"),
}
"""The words for each code of a refusal, and its remedy."""
CANNOT = "source and destination cannot be paired"
TOLD, VALUE = 10, 160
"""Reasons that a message names, and characters of each of their two values."""


class PlanRefused(Malformed):
    """The two sides cannot be paired. The message names the first reasons, `refusals` lists every one; both with both
    values."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        told = reasons(refusals)
        rest = len(told) - TOLD
        more = [f"and {rest} more reason{'s' * (rest > 1)}"] if rest > 0 else []
        remedies = dict.fromkeys(MEANING[refusal.code][1] for refusal in refusals)
        super().__init__(
            "refused",
            f"{CANNOT}: {'; '.join(told[:TOLD] + more)}",
            remedy="; ".join(remedies),
            refusals=tuple(refusals),
        )


def reasons(refusals: Iterable[Refusal]) -> list[str]:
    """Each reason once, with the range of layers that it holds for: `layers 0-79 k: dtype: source has ...`."""
    layers: dict[Refusal, list[int]] = {}
    for refusal in refusals:
        layer, _, name = refusal.component.partition(".")
        source, destination = shorten(refusal.source, VALUE), shorten(refusal.destination, VALUE)
        alike = replace(refusal, component=name, source=source, destination=destination)
        layers.setdefault(alike, []).extend([int(layer)] if name else [])
    return [_reason(alike, found) for alike, found in layers.items()]


def _reason(alike: Refusal, layers: Sequence[int]) -> str:
    """alike: without a layer."""
    if len(layers) > 1:
        return f"layers {ranges(layers)} {alike.component}: {replace(alike, component='')}"
    return str(replace(alike, component=f"{layers[0]}.{alike.component}") if layers else alike)


def ranges(layers: Iterable[int]) -> str:
    """Layers as 0-3, 5, 100."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
