"""Memory of engines that are gone which stays taken until the daemon ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferryd.memory import Region


@dataclass(slots=True)
class Unfreed:
    """Keeps the regions: what may still be written must not be unmapped, and what could not be freed is still taken."""

    _held: list[tuple[str, Region, str]] = field(default_factory=list)
    """With the engine's id, and why."""

    def hold(self, engine_id: str, region: Region, why: str) -> None:
        self._held.append((engine_id, region, why))

    def let_go(self, region: Region) -> None:
        """It can be freed now."""
        self._held = [each for each in self._held if each[1] is not region]

    @property
    def nbytes(self) -> int:
        return sum(region.span.nbytes for _, region, _ in self._held)

    def said(self) -> list[str]:
        """A line for each engine."""
        taken: dict[str, tuple[int, str]] = {}
        for engine_id, region, why in self._held:
            taken[engine_id] = taken.get(engine_id, (0, ""))[0] + region.span.nbytes, why
        return [
            f"engine {engine_id}: {nbytes} bytes of a session that is over stay taken until the daemon is started "
            f"anew: {why}"
            for engine_id, (nbytes, why) in taken.items()
        ]
