"""Command-line flags made from a pydantic model, which also checks what they were given."""

from __future__ import annotations

import argparse
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """A flag for each field that has a description, called after its alias or its name. A tuple's is repeatable."""
    for name, field in model.model_fields.items():
        if field.description is None:
            continue
        kind, options = field.annotation, dict[str, Any](dest=name, default=argparse.SUPPRESS)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            usual = "N" if kind is int else "S" if kind is float else "NAME"
            options |= {"metavar": (field.examples or [usual])[0], "required": field.is_required()}
        if get_origin(kind) is tuple:
            options["action"] = "append"
        told = not field.is_required() and field.default != () and kind is not bool
        default = f" (default: {field.default})" if told else ""
        parser.add_argument(_flag(field.alias or name), help=field.description + default, **options)


def checked(parser: argparse.ArgumentParser, model: type[M], args: argparse.Namespace) -> M:
    """A model made of the flags. Exits with 2 and one line that names the flag, as argparse does."""
    try:
        return model.model_validate({name: value for name, value in vars(args).items() if name in model.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"argument {_flag(model.model_fields[name].alias or name)}: " if name else ""
        parser.error(f"{where}{first['msg'].removeprefix('Value error, ')}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
