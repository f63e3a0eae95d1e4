"""Models of pydantic's whose faults are KvferryErrors, where Python makes them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pydantic import BaseModel, ValidationError

from kvferry.errors import KvferryError


class Checked(BaseModel):
    """Only what Python makes by name raises what `_fault` says: JSON that is read stays pydantic's own, with the place
    of each fault."""

    def __init__(self, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise self._fault(error) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    @abstractmethod
    def _fault(cls, error: ValidationError) -> KvferryError:
        """The error in our words."""
