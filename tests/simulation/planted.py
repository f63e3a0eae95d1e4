"""How a fault is planted in a machine; the simulator has to find every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Planted = tuple[type, str, Callable[..., Any]]


def changed(kind: type, name: str, change: Callable[..., Any]) -> Planted:
    """change: is called with what the method returns, then with its arguments."""
    method = getattr(kind, name)

    def broken(*args: Any, **more: Any) -> Any:
        return change(method(*args, **more), *args, **more)

    return kind, name, broken


def without(*kinds: type) -> Callable[..., Any]:
    """These effects are lost."""
    return lambda effects, *_, **__: [each for each in effects if not isinstance(each, kinds)]


def nothing(*_: Any, **__: Any) -> None:
    """In place of what does something."""


def no_effects(*_: Any, **__: Any) -> list[Any]:
    return []
