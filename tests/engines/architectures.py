"""Pairs of vLLM engines, each in one process, to which one model after another is given."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines import ANSWER_S, PREFILL_LEG, START_S, Engines, fleet_of, transfers_at
from kvferry.schemas import TransferRecord
from kvferryd.demo.fleet import DaemonService

SIDES = ("p", "d")
VOCABULARY = 576
DEVICE = os.environ.get("ENGINES_DEVICE", "cpu")
"""The device of both daemons. `cuda:0`, with vLLM for CUDA in ENGINES_VENV: both engines share that GPU."""


@dataclass(frozen=True)
class Model:
    """A checkpoint of checkpoints.py, its engines' options, and those of one side.

    apart: prefill is given all but the prompt's last token, as always on a GPU. The rows are then those of
    `Stages.split`, bit for bit, where rounding differs with the number of tokens that are computed together. Layers
    with states need no such help: prefill leaves the last token out by itself.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = DEVICE != "cpu"


class Staged:
    """An engine: worker/poisoned.py is its connector, worker/forced.py chooses a first token."""

    def __init__(self, name: str, daemon: DaemonService, asked: Connection) -> None:
        self._name, self.daemon, self._asked = name, daemon, asked

    def begin_load(self, folder: Path, **options: Any) -> None:
        transfer = {
            "kv_role": "kv_both", "kv_connector": "PoisonedConnector", "kv_connector_module_path": "poisoned",
            "engine_id": self._name, "kv_connector_extra_config": {"socket": str(self.daemon.socket)},
        }  # fmt: skip
        if draft := options.get("speculative_config"):  # its model lies in the folder
            options["speculative_config"] = draft | {"model": str(folder / draft["model"])}
        self._asked.send(("load", {"model": str(folder), "kv_transfer_config": transfer, **options}))

    def generate(self, tokens: Sequence[int], max_tokens: int, **extra: Any) -> tuple[list[int], Any]:
        found, params = self._ask("generate", tokens=list(tokens), max_tokens=max_tokens, **extra)
        return found, params

    def problem(self) -> Exception | None:
        """Why the model could not be loaded."""
        try:
            self.answer()
        except RuntimeError as error:
            return error
        return None

    def write(self, name: str, folder: Path) -> None:
        self._ask("write", name=name, folder=str(folder))

    def _ask(self, call: str, **arguments: Any) -> Any:
        self._asked.send((call, arguments))
        return self.answer()

    def answer(self) -> Any:
        if not self._asked.poll(ANSWER_S):
            raise TimeoutError(f"engine {self._name} does not answer")
        if isinstance(answer := self._asked.recv(), Exception):
            raise answer
        return answer


@dataclass
class Stages:
    fleet: Engines
    prefill: Staged
    decode: Staged
    model: Model | None = None

    def load(self, model: Model) -> None:
        self.model = model
        folder = self.fleet.directory / model.name
        if not folder.exists():
            self.prefill.write(model.name, folder)
        self.prefill.begin_load(folder, **dict(model.options) | dict(model.prefill))
        self.decode.begin_load(folder, **dict(model.options) | dict(model.decode))
        problems = [engine.problem() for engine in (self.prefill, self.decode)]  # both of them: each answers once
        for problem in filter(None, problems):
            raise problem

    def handover(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        prefilled = tokens[:-1] if self.model and self.model.apart else tokens
        _, params = self.prefill.generate(prefilled, 1, kv_transfer_params=PREFILL_LEG)
        return self.decode.generate(tokens, max_tokens, kv_transfer_params=params)[0]

    def split(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The prefill engine's own answer, the prompt's last token computed alone as decode does: sums of bfloat16
        differ with what is computed together. So nothing is taken from what it has cached of a handover."""
        last, *found = self.prefill.generate(tokens[:-1], max_tokens + 1, salt="split", first=tokens[-1])[0]
        assert last == tokens[-1]
        return found

    def transfers(self) -> list[TransferRecord]:
        return transfers_at(self.decode.daemon)


@contextmanager
def stages() -> Iterator[Stages]:
    with fleet_of(Engines) as fleet, ExitStack() as opened:
        daemons = [fleet.daemon(f"{name}-0", flags=("--device", DEVICE)) for name in SIDES]
        listeners = [opened.enter_context(fleet.in_process(name)) for name in SIDES]
        asyncio.run(fleet.ready(*daemons, timeout_s=START_S))
        asked = [opened.enter_context(listener.accept()) for listener in listeners]
        for each in asked:
            assert each.recv() == "ready"
        yield Stages(fleet, *(Staged(*side) for side in zip(SIDES, daemons, asked, strict=True)))
