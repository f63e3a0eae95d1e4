"""Frozen values: messages, events and effects. An order makes some sixty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """A dataclass with slots that the type checker does not let change. Nothing checks it at run time: that would make
    each value four times as dear."""
    return dataclass(slots=True, unsafe_hash=True)(kind)
