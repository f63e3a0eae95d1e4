"""Command-line flags made from a pydantic model, which also checks what they were given."""

from __future__ import annotations

import argparse
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """One flag for each field that has a description, called after its alias or its name. A tuple's is repeatable."""
    for name, field in model.model_fields.items():
        kind, options = field.annotation, dict[str, Any](dest=name, default=argparse.SUPPRESS)
        if field.description is None:
            continue
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is tuple:
            options |= {"action": "append", "metavar": "NAME"}
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["metavar"] = "N" if kind is int else "S" if kind is float else "NAME"
        default = "" if field.default in ((), True, False) else f" (default: {field.default})"
        parser.add_argument(_flag(name, model), help=field.description + default, **options)


def checked(parser: argparse.ArgumentParser, model: type[M], args: argparse.Namespace) -> M:
    """What the flags gave. Exits with 2 and one line that names the flag, as argparse does."""
    try:
        return model.model_validate(vars(args))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"argument {_flag(name, model)}: " if name in model.model_fields else ""
        parser.error(f"{where}{first['msg'].removeprefix('Value error, ')}")


def _flag(name: str, model: type[BaseModel]) -> str:
    return "--" + (model.model_fields[name].alias or name).replace("_", "-")
