"""docs/reference/python.md: the names of `kvferry`, from their docstrings and signatures."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

import kvferry
from kvferry.errors import KvferryError

PARTS = {
    "engine": "For engines, in asyncio",
    "blocking": "For engines, from threads",
    "manifest": "What lies where in a cache",
    "tables": "Blocks",
    "memory": "Memory",
    "router": "For routers",
    "schemas": "What is ordered, and states",
    "errors": "Errors",
}
"""The modules in which the names are at home, in the order of the page."""
WIDTH = 120


class _Bare(str):
    """An annotation as it is written in the source: without quotes round it."""

    __repr__ = str.__str__


def python_page(made: str) -> str:
    assert set(PARTS) == set(kvferry._HOMES)
    parts = [
        f"""{made}
# Python

What `import kvferry` gives: the clients of engines and of routers. What fails raises `KvferryError`, with a
[code](errors.md), the field and value that were wrong, and a remedy. [Engines](../engines.md) says what an engine
promises; [examples](../../examples/engine.py) are whole programs. An `async def` is awaited. The clients are context
managers: `async with await EngineClient.connect(...) as client:` ends the session also on an error.
"""
    ]
    for home, title in PARTS.items():
        parts.append(f"## {title}\n")
        module = importlib.import_module(f"kvferry.{home}")
        for name in kvferry._HOMES[home]:
            parts += _named(name, getattr(module, name))
    return "\n".join(parts)


def _named(name: str, value: Any) -> Iterator[str]:
    yield f'### <a id="{name.lower()}"></a>{name}\n'
    if not inspect.isclass(value):
        yield _code(f"{_signature(name, value)}")
        yield _prose(value)
        return
    yield _prose(value)
    if issubclass(value, enum.Enum):
        yield ", ".join(f"`{each.value}`" for each in value) + ".\n"
    elif issubclass(value, BaseModel):
        yield from _fields(value)
    elif dataclasses.is_dataclass(value):
        told = [each for each in dataclasses.fields(value) if not each.name.startswith("_")]
        yield from _table(("field", "type"), [(f"`{each.name}`", _type(str(each.type))) for each in told])
    elif "__init__" in vars(value) and not hasattr(value, "connect"):
        yield _code(_signature(name, value.__init__).removeprefix("def ").removesuffix(" -> None"))
    for member, found, held in _members(value):
        if held:
            yield f"**`{member}`** (property): {_line(found)}\n"
        else:
            yield _code(_signature(member, found))
            if found.__doc__:
                yield _prose(found)


def _members(value: type) -> Iterator[tuple[str, Any, bool]]:
    """(name, function, whether it is a property) of what is public and ours, in order."""
    seen = set()
    for kind in value.__mro__:
        of_all_errors = kind is KvferryError and value is not kind
        if not kind.__module__.startswith("kvferry") or issubclass(value, enum.Enum) or of_all_errors:
            continue
        for member, raw in vars(kind).items():
            held = isinstance(raw, property | functools.cached_property)
            function = (raw.fget if isinstance(raw, property) else raw.func) if held else getattr(raw, "__func__", raw)
            if not member.startswith("_") and member not in seen and inspect.isfunction(function):
                seen.add(member)
                of_class = isinstance(raw, classmethod | staticmethod)
                yield f"{value.__name__}.{member}" if of_class else member, function, held


def _fields(model: type[BaseModel]) -> Iterator[str]:
    types: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        types |= {name: str(told) for name, told in vars(kind).get("__annotations__", {}).items()}
    rows = []
    for name, field in model.model_fields.items():
        default = "needed" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        rows.append((f"`{name}`", _type(types[name]), default))
    return _table(("field", "type", "default"), rows)


def _type(told: str) -> str:
    if told.startswith("Annotated["):  # the model's own words say what is checked beside it
        told = re.match(r"Annotated\[([^\[,]+(\[[^\]]*\])?)", told)[1]  # type: ignore[index]
    return f"`{told}`".replace("|", chr(92) + "|")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)) + "\n"


def _signature(name: str, function: Any) -> str:
    """As it is called: without self; a parameter a line where one line is too long."""
    told = inspect.signature(function)
    given = [
        each.replace(annotation=_Bare(each.annotation))
        for each in told.parameters.values()
        if each.name not in ("self", "cls")
    ]
    told = told.replace(parameters=given, return_annotation=_Bare(told.return_annotation))
    line = f"{'async def' if inspect.iscoroutinefunction(function) else 'def'} {name}{told}"
    if len(line) <= WIDTH:
        return line
    inner, _, result = line.partition("(")[2].rpartition(")")
    parts = re.split(r", (?=\*|\w+[:=]|\w+ ?[:=]|\w+$)", inner)
    return "\n".join([line.partition("(")[0] + "(", *(f"    {part}," for part in parts), f"){result}"])


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _prose(value: Any) -> str:
    """A docstring as Markdown: what follows >>> is a block of code."""
    lines, code = [], False
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if line.startswith((">>> ", "... ")) is not code:
            lines.append("```" if code else "```python")
            code = not code
        lines.append(line[4:] if code else line.replace("<", "&lt;"))
    return "\n".join([*lines, *(["```"] if code else []), ""])


def _line(value: Any) -> str:
    return " ".join((value.__doc__ or "").split())
