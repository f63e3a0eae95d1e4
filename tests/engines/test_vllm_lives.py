"""Loads that fail and are computed again, second turns, progressive publishing; engines and daemons that die.

The tests of a module share its engines, and the last ones kill them: they run in the order in which they stand here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from engines import PREFILL_LEG, Pair, cache_usage, complete, eventually, pair, prompt, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
TTL_S = 3.0


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    with pair(
        prefill={"options": {"progressive": True}},
        decode={
            "options": {"second_turn": True, "load_timeout_s": 10},
            "transfer": {"kv_load_failure_policy": "recompute"},
        },
        daemon_flags=("--lease-ttl-s", str(TTL_S)),
    ) as both:
        yield both


def test_a_prefill_in_chunks_that_is_published_chunk_by_chunk(engines: Pair) -> None:
    tokens = prompt(1400)
    assert engines.handover(tokens) == engines.alone(tokens)
    assert engines.transfers()[-1].tokens == (0, 1400)


def test_the_second_turn_flows_back(engines: Pair) -> None:
    """What decode has generated, prefill reads, before it prefills what the user said next."""
    first = prompt(150, seed=1)
    answer = complete(engines.decode, first, max_tokens=40, kv_transfer_params=engines.prefilled(first))
    back = answer.json()["kv_transfer_params"]
    assert back["do_remote_decode"] is True
    assert back["do_remote_prefill"] is False
    assert back["remote_num_tokens"] == 150 + 40 - 1

    second = [*first, *tokens_of(answer), *prompt(50, seed=2)]
    again = complete(engines.prefill, second, max_tokens=1, kv_transfer_params=back)
    assert again.status_code == 200
    there = Pair(engines.fleet, engines.decode, engines.prefill, engines.decode_daemons, engines.prefill_daemons)
    assert there.transfers()[-1].state == "done"
    assert there.transfers()[-1].tokens == (128, 189)
    done = complete(engines.decode, second, kv_transfer_params=again.json()["kv_transfer_params"])
    assert tokens_of(done) == engines.alone(second)


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": "yes"}])
def test_params_that_mean_nothing_are_prefilled_here(engines: Pair, params: dict[str, object]) -> None:
    tokens = prompt(70, seed=3)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == engines.alone(tokens)


def test_kv_that_has_expired_is_computed_again(engines: Pair) -> None:
    tokens = prompt(300, seed=4)
    params = engines.prefilled(tokens)
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == engines.alone(tokens)
    assert engines.transfers()[-1].state == "failed"
    assert eventually(lambda: cache_usage(engines.decode) == 0)


def test_what_an_engine_published_outlives_it(engines: Pair) -> None:
    tokens = prompt(222, seed=5)
    alone = engines.alone(tokens)
    params = engines.prefilled(tokens)
    engines.prefill.signal(signal.SIGKILL)
    engines.prefill.process.wait(10)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == alone
    assert engines.transfers()[-1].state == "done"


def test_a_source_that_is_gone_costs_its_request_a_prefill(engines: Pair) -> None:
    tokens = prompt(90, seed=6)
    gone = PREFILL_LEG | {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_request_id": "x",
        "remote_host": "127.0.0.1", "remote_port": engines.fleet.free_port(),
    }  # fmt: skip
    once = tokens_of(complete(engines.decode, tokens, kv_transfer_params=gone))
    assert once == tokens_of(complete(engines.decode, tokens))


def test_an_engine_goes_on_without_its_daemon(engines: Pair) -> None:
    tokens = prompt(80, seed=7)
    before = tokens_of(complete(engines.decode, tokens))
    engines.decode_daemons[0].signal(signal.SIGKILL)
    engines.decode_daemons[0].process.wait(10)
    began = time.monotonic()
    params = PREFILL_LEG | {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_request_id": "y",
        "remote_host": "127.0.0.1", "remote_port": 9,
    }  # fmt: skip
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == before
    assert time.monotonic() - began < 30
    kept = complete(engines.decode, tokens, max_tokens=1, kv_transfer_params=PREFILL_LEG)
    assert kept.status_code == 200
    assert tokens_of(complete(engines.decode, tokens)) == before
    assert eventually(lambda: cache_usage(engines.decode) == 0)
