"""How far estimates of a peer's ways are off, learnt from what transfers took."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.25
"""Of the newest transfer, in the logarithm."""
STEP, BOUND = 4.0, 16.0
"""No transfer says more than that it took STEP times its estimate, or a STEPth; factors stay in 1/BOUND to BOUND."""
FORGET = 0.98
"""A way that was not taken drifts back to its estimate, so that a bad hour does not rule it out for ever."""
LEAST_S = 1e-3
"""What is expected to take less, and does, is the control path's: nothing is learnt from it."""


@dataclass(slots=True)
class Calibration:
    """One factor for each way to one peer, by which its estimate is multiplied."""

    _factors: dict[str, float] = field(default_factory=dict)

    def factor(self, way: str) -> float:
        return self._factors.get(way, 1.0)

    def learn(self, way: str, estimate_s: float, took_s: float) -> None:
        """estimate_s: as it was given, the factor of that time included."""
        if max(estimate_s, took_s) < LEAST_S or estimate_s <= 0:
            return
        ratio = min(STEP, max(1 / STEP, took_s / estimate_s))
        for other, factor in self._factors.items():
            if other != way:
                self._factors[other] = factor**FORGET
        self._factors[way] = min(BOUND, max(1 / BOUND, self.factor(way) * ratio**WEIGHT))
