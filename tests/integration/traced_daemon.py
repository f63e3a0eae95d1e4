"""A daemon that notes how each router's order goes: by which of our modules until the first read is posted, and which
forms the values of MARKS take from their doors to the plan. `traced_daemon.py FILE ARGUMENTS`, with the arguments of
`kvferry`. A line of the file for each order, in JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from google.protobuf.message import Message
from pydantic import BaseModel

from kvferryd.commands.cli import main

ORDER, LAST = ("kvferryd.api.rest.routes", "order"), ("kvferryd.transport.read", "post")
RECEIVE, REPLY = ("kvferryd.api.engine", "_receive"), ("kvferryd.peers.reader_stream", "_hear")
PLAN = ("kvferryd.plan.bind", "bind")
OURS, GENERATED = ("kvferry.", "kvferryd."), "kvferry.v1."
SOURCE, TOKENS, PUBLISHED, RESERVED = "the-source", 53, (11, 8, 14, 6), (5, 3, 9, 2)
"""Values that nothing else has: the source's engine id, the last token, blocks."""
MARKS = {"source": ORDER, "tokens": RECEIVE, "reserved blocks": RECEIVE, "published blocks": REPLY}
"""Values of an order, and the door of each."""
DEEP = 6


class Trace:
    def __init__(self, file: Path) -> None:
        self._file, self._modules = file, dict[str, None]()
        self._forms: dict[str, dict[str, None]] = {}
        """Values that have come by their doors, and have not reached the plan."""
        self._whole: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(OURS) or module.startswith(GENERATED):
            return
        at = module, frame.f_code.co_name
        for mark, door in MARKS.items():
            if at == door:
                self._forms.setdefault(mark, {})
        if self._forms:
            self._note_forms(frame)
        if at == PLAN:
            self._whole, self._forms = {mark: list(forms) for mark, forms in self._forms.items()}, {}
        if self._modules or at == ORDER:
            self._modules.setdefault(module)
        if at == LAST and self._modules:  # else the read of a word
            said = {"modules": list(self._modules), "forms": self._whole}
            self._modules = {}
            with self._file.open("a") as file:
                file.write(f"{json.dumps(said)}\n")

    def _note_forms(self, frame: FrameType) -> None:
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in arguments:
            if name != "self" and name in frame.f_locals:
                for mark, form in marked(frame.f_locals[name]):
                    if mark in self._forms:
                        self._forms[mark].setdefault(form)


def marked(value: Any, deep: int = DEEP) -> Iterator[tuple[str, str]]:
    """The marks in an argument, each with the type that has it: a source is what names its engine and address, tokens
    are a range and blocks a list. Objects that change are no values, and are not looked into."""
    form = type(value).__name__
    if getattr(value, "engine_id", None) == SOURCE and hasattr(value, "address"):
        yield "source", form
    match value:
        case (0, int(stop)) if stop == TOKENS:
            yield "tokens", form
        case np.ndarray():
            yield from _listed(value.ravel().tolist(), form)
        case Message():
            if getattr(value, "stop", None) == TOKENS:
                yield "tokens", form
            parts = [each for _, each in value.ListFields()]
            yield from _inside(parts, deep)
        case str() | bytes() | type():
            pass
        case Mapping():
            yield from _inside(value.values(), deep)
        case Sequence() if not isinstance(value, range):
            yield from _listed(list(value), form)
            yield from _inside(value, deep)
        case BaseModel():
            yield from _inside(vars(value).values(), deep)
        case _ if dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:
            yield from _inside([getattr(value, each.name) for each in dataclasses.fields(value)], deep)


def _listed(values: list[Any], form: str) -> Iterator[tuple[str, str]]:
    for mark, blocks in (("published blocks", PUBLISHED), ("reserved blocks", RESERVED)):
        if values == list(blocks):
            yield mark, form


def _inside(values: Any, deep: int) -> Iterator[tuple[str, str]]:
    for each in values if deep else ():
        yield from marked(each, deep - 1)


if __name__ == "__main__":
    trace = Trace(Path(sys.argv[1]))
    threading.setprofile(trace)
    sys.setprofile(trace)
    sys.exit(main(sys.argv[2:]))
