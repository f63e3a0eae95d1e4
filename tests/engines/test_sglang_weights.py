"""Weights that are replaced in SGLang engines which serve: every answer is one model's, and none is of a mixture."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sglang_engines import START_S, SglangEngine, generate, room, sglang_fleet, tokens_of

import engines
from engines import ANSWER_S, MODEL, eventually, prompt
from kvferry.reference.config import ModelSource
from kvferry.reference.model import write_checkpoint
from kvferryd.demo.fleet import Service

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(3000)]
PREFIX = prompt(96, seed=77)
AT_ONCE, BEFORE, AFTER = 2, 3, 5
"""Clients, and how many answers they get before and after a change."""


@dataclass
class Both:
    """A prefill and a decode engine, one alone of each of two models, and their folders."""

    prefill: SglangEngine
    decode: SglangEngine
    alone: tuple[Service, Service]
    a: Path
    b: Path
    made: int = 0

    def prompt(self) -> list[int]:
        self.made += 1
        return [*PREFIX, *prompt((40, 130, 500)[self.made % 3], seed=1000 + self.made)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    other = tmp_path_factory.mktemp("weights") / "b"
    write_checkpoint(ModelSource(MODEL, seed=1), other)
    with sglang_fleet(MODEL) as fleet:
        prefill, decode = fleet.sglang("p", mode="prefill"), fleet.sglang("d", mode="decode")
        alone = fleet.engine("a"), fleet.engine("b", seed=1)
        asyncio.run(fleet.ready(prefill, decode, *alone, timeout_s=START_S))
        yield Both(prefill, decode, alone, fleet.directory / "model", other)


def replaced(engine: SglangEngine, folder: Path, **more: object) -> None:
    """SGLang waits for the requests under way, and flushes its cache, or says that it could not: blocks of requests
    that have failed are kept until nothing can be written to them."""
    answer = called(engine, "update_weights_from_disk", model_path=str(folder), **more)
    if "the cache was not flushed" in answer.text:
        assert eventually(lambda: called(engine, "flush_cache").status_code == 200, ANSWER_S)
    else:
        assert answer.status_code == 200, answer.text


def called(engine: SglangEngine, what: str, **body: object) -> httpx.Response:
    return httpx.post(f"{engine.url}/{what}", json=body, trust_env=False, timeout=ANSWER_S)


def handed_over(both: Both) -> tuple[list[int], list[int] | None]:
    """(a new prompt, its answer; None for an error)."""
    tokens, where = both.prompt(), room(both.prefill)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, both.prefill, tokens, max_tokens=4, **where)
        moved = generate(both.decode, tokens, max_tokens=4, **where)
        prefilled.result()
    return tokens, tokens_of(moved) if moved.status_code == 200 else None


def under_load(both: Both, change: Callable[[], None]) -> None:
    """Every answer that clients get around the change is that of one of the two models alone, or an error."""
    answers: list[tuple[list[int], list[int] | None]] = []
    ending = threading.Event()

    def ask() -> None:
        while not ending.is_set():
            answers.append(handed_over(both))

    def come(count: int) -> None:
        wanted = len(answers) + count
        assert eventually(lambda: len(answers) >= wanted, ANSWER_S)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = [pool.submit(ask) for _ in range(AT_ONCE)]
        try:
            come(BEFORE)
            change()
            come(AFTER)
        finally:
            ending.set()
    for client in clients:
        client.result()
    mixed = []
    for tokens, answer in answers:
        if answer is not None and answer not in (each := alone(both, tokens)):
            mixed.append((len(tokens), answer, each))
    assert not mixed, f"{len(mixed)} of {len(answers)} answers are neither model's: {mixed}"


def alone(both: Both, tokens: list[int]) -> list[list[int]]:
    return [engines.tokens_of(engines.complete(engine, tokens, max_tokens=4)) for engine in both.alone]


def is_handed_over(both: Both, model: int) -> None:
    tokens, answer = handed_over(both)
    assert answer == alone(both, tokens)[model]


def test_weights_replaced_under_load_on_one_side_and_then_on_the_other(both: Both) -> None:
    is_handed_over(both, 0)
    under_load(both, lambda: replaced(both.prefill, both.b))
    _, answer = handed_over(both)
    assert answer is None
    assert {moved.error.code for moved in both.decode.transfers() if moved.error} <= {
        "other_weights", "mixed_weights", "lease_ended",
    }  # fmt: skip
    under_load(both, lambda: replaced(both.decode, both.b))
    is_handed_over(both, 1)

    replaced(both.decode, both.a, weight_version="first")
    _, answer = handed_over(both)
    assert answer is None
    replaced(both.prefill, both.a, weight_version="first")
    is_handed_over(both, 0)

    for what, body in (("weights_checker", {"action": "reset_tensors"}), ("flush_cache", {})):
        assert called(both.prefill, what, **body).status_code == 200
    _, answer = handed_over(both)
    assert answer is None
    assert {moved.error.code for moved in both.decode.transfers()[-1:] if moved.error} == {"other_weights"}
