"""The one error of the project: a stable code, what was wrong, and what to do about it.

The same five fields travel as problem+json over REST, as a `Problem` message over gRPC, and as text on
the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a source and a destination cannot be paired, with both values."""

    code: str
    component: str
    source: str
    destination: str

    def __str__(self) -> str:
        where = f"component {self.component}: " if self.component else ""
        return f"{where}{self.code}: source has {self.source}, destination has {self.destination}"


class KvferryError(Exception):
    """What every door of kvferry answers with.

    code: stable, snake_case, for programs. message: one sentence for people. field and value: what was
    wrong, where one field was. remedy: what to do. refusals: the reasons, when a pair was refused.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str = "",
        value: object = "",
        remedy: str = "",
        refusals: tuple[Refusal, ...] = (),
    ) -> None:
        super().__init__(_text(message))
        self.code = code
        self.message = _text(message)
        self.field = _text(field)
        self.value = _shorten(value)
        self.remedy = remedy
        self.refusals = refusals

    def __str__(self) -> str:
        parts = [self.message]
        if self.field:
            parts.append(f"({self.field} = {self.value})")
        if self.remedy:
            parts.append(f"-> {self.remedy}")
        return " ".join([*parts, *(f"\n  {refusal}" for refusal in self.refusals)])


def first_breach(error: ValidationError, root: str, code: str, remedy: str) -> KvferryError:
    """The first thing that is wrong with an object called `root`."""
    first = error.errors(include_url=False)[0]
    field = ".".join([root, *(str(part) for part in first["loc"])])
    return KvferryError(code, f"{field}: {first['msg']}", field=field, value=first.get("input", ""), remedy=remedy)


def _text(value: str) -> str:
    """Text that any encoding takes: a value from a JSON body may hold lone surrogates, told as `\\ud800`."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _shorten(value: object, limit: int = 200) -> str:
    text = _text(str(value))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
