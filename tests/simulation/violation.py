"""Something that must hold in a simulated world does not."""

from __future__ import annotations


class Violation(AssertionError):
    """kind: the same for all runs that find the same."""

    def __init__(self, kind: str, about: str = "") -> None:
        super().__init__(f"{kind}: {about}" if about else kind)
        self.kind = kind
