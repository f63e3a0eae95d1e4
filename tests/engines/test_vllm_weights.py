"""Weights that are replaced in vLLM engines which serve: every answer is one model's, and none is of a mixture."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import ANSWER_S, MODEL, Pair, Service, complete, eventually, leases_at, missed, pair, prompt, tokens_of
from kvferry.reference.config import ModelSource
from kvferry.reference.model import write_checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(400)]
PREFIX = prompt(160, seed=77)
"""The beginning of all prompts: five blocks, which the prefix caches keep."""
DIVISIBLE = dataclasses.replace(MODEL, intermediate_size=960, vocab_size=576)
"""A model that 2 divides, as vLLM wants of every dimension that it splits."""
RANKS = [(1, 1), (2, 1), (1, 2)]
"""Ranks of tensor parallelism, of prefill and of decode."""
AT_ONCE, BEFORE, AFTER = 3, 6, 9
"""Clients, and how many answers they get before and after a change."""


@dataclass
class Both:
    """A prefill and a decode engine, and the folders of two models of one configuration."""

    pair: Pair
    a: Path
    b: Path
    made: int = 0
    """How many prompts there have been: each is another one."""

    def prompt(self) -> list[int]:
        self.made += 1
        return [*PREFIX, *prompt((40, 130, 500, 700)[self.made % 4], seed=1000 + self.made)]


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: "TP{} to TP{}".format(*ranks))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    other, (theirs, ours) = tmp_path_factory.mktemp("weights") / "b", request.param
    write_checkpoint(ModelSource(DIVISIBLE, seed=1), other)
    flags = ("--lease-ttl-s", "60", "--deadline-s", "20")
    with pair(DIVISIBLE, prefill={"ranks": theirs}, decode={"ranks": ours}, daemon_flags=flags) as engines:
        yield Both(engines, engines.fleet.directory / "model", other)


def call(engine: Service, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{engine.url}{path}", json=body or None, trust_env=False, timeout=ANSWER_S)
    answer.raise_for_status()
    return answer.json() if answer.content else None


def reset(engine: Service) -> None:
    """The prefix cache. vLLM does it when no request has blocks."""
    assert eventually(lambda: bool(call(engine, "/reset_prefix_cache")["success"]))


def reset_all(engines: Pair) -> None:
    """Also where prefill keeps blocks for requests that decode has refused."""
    for daemon in engines.prefill_daemons:
        for lease in leases_at(daemon):
            httpx.delete(f"{daemon.url}/v1/leases/{lease.request_id}", trust_env=False)
    for engine in (engines.prefill, engines.decode):
        reset(engine)


def reload(engine: Service, folder: Path) -> None:
    call(engine, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})


def alone(engine: Service, tokens: list[int]) -> list[int]:
    return tokens_of(complete(engine, tokens, max_tokens=4))


def handed_over(both: Both) -> tuple[list[int], list[int] | None]:
    """(a new prompt, its answer; None for an error)."""
    tokens = both.prompt()
    answer = complete(both.pair.decode, tokens, max_tokens=4, kv_transfer_params=both.pair.prefilled(tokens))
    return tokens, tokens_of(answer) if answer.status_code == 200 else None


@dataclass
class Load:
    """Clients that ask without a pause; `answers` is what they got."""

    both: Both
    answers: list[tuple[list[int], list[int] | None]] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        while not self.ending.is_set():
            self.answers.append(handed_over(self.both))

    def come(self, count: int) -> None:
        """Wait for so many answers more."""
        wanted = len(self.answers) + count
        assert eventually(lambda: len(self.answers) >= wanted, ANSWER_S)


@contextmanager
def load(both: Both) -> Iterator[Load]:
    asking = Load(both)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = [pool.submit(asking.ask) for _ in range(AT_ONCE)]
        try:
            asking.come(BEFORE)
            yield asking
            asking.come(AFTER)
        finally:
            asking.ending.set()
    for client in clients:
        client.result()


def of_one_model(asked: Load) -> None:
    """Every answer is that of one of the two engines alone: by now their weights differ as those of the load did."""
    engines = asked.both.pair.prefill, asked.both.pair.decode
    reset_all(asked.both.pair)
    mixed = []
    for tokens, answer in asked.answers:
        if answer is not None and answer not in (each := [alone(engine, tokens) for engine in engines]):
            mixed.append((len(tokens), answer, each))
    assert not mixed, f"{len(mixed)} of {len(asked.answers)} answers are neither model's: {mixed}"


def is_handed_over(both: Both) -> None:
    """KV goes from the one to the other, and the answer is that of the prefill engine alone."""
    before = len(both.pair.transfers())
    tokens, answer = handed_over(both)
    assert [moved.state for moved in both.pair.transfers()[before:]] == ["done"]
    assert answer == alone(both.pair.prefill, tokens)


def test_weights_replaced_under_load_on_one_side_and_then_on_the_other(both: Both) -> None:
    """And back again in the other order. No request of decode runs on over its change: its answer would be mixed."""
    prefill, decode = both.pair.prefill, both.pair.decode
    is_handed_over(both)
    with load(both) as asked:
        reload(prefill, both.b)
        asked.come(AFTER)  # KV of the old ones in the prefix cache is not published
        reset(prefill)
    of_one_model(asked)
    assert {moved.error.code for moved in both.pair.transfers() if moved.error} <= {
        "other_weights", "mixed_weights", "lease_ended",
    }  # fmt: skip
    assert missed(prefill, "mixed_weights") > 0
    tokens, answer = handed_over(both)
    assert answer is None and alone(decode, tokens) != alone(prefill, tokens)

    replaced(decode, both.b)
    is_handed_over(both)

    with load(both) as asked:
        replaced(decode, both.a)
    of_one_model(asked)
    replaced(prefill, both.a)
    is_handed_over(both)


def test_a_version_or_a_name_that_a_caller_gives_is_compared(both: Both) -> None:
    def version(engine: Service, name: str) -> None:
        call(engine, "/update_weight_version", new_version=name)

    def name(engine: Service, name: str) -> None:
        call(engine, "/collective_rpc", method="kvferry_weights", args=[name])

    for give, value in ((version, "v7"), (name, "mine")):
        give(both.pair.prefill, value)
        reset_all(both.pair)
        _, answer = handed_over(both)
        assert answer is None
        error = (
            both.pair.transfers()[-2].error or both.pair.transfers()[-1].error
        )  # vLLM ends a failed one with another
        assert error is not None and error.code == "other_weights" and repr(value) in error.message
        give(both.pair.decode, value)
        is_handed_over(both)


def test_what_decode_has_cached_by_the_weights_before_is_not_mixed_with_what_is_handed_over(both: Both) -> None:
    reset_all(both.pair)
    is_handed_over(both)  # since then decode's prefix cache has PREFIX
    replaced(both.pair.prefill, both.b)
    reload(both.pair.decode, both.b)
    tokens, answer = handed_over(both)
    assert answer in (None, alone(both.pair.prefill, tokens))
    assert missed(both.pair.decode, "failed") > 0
    reset_all(both.pair)
    is_handed_over(both)


def replaced(engine: Service, folder: Path) -> None:
    """As a trainer does it: when the requests under way have ended, and with its prefix cache."""
    call(engine, "/pause?mode=wait&clear_cache=true")
    reload(engine, folder)
    call(engine, "/resume")
