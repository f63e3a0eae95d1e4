"""Loads that fail and are computed again, second turns, progressive publishing; engines and daemons that die.

The tests of a module share its engines, and the last ones kill them: they run in the order in which they stand here.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engines import PREFILL_LEG, Pair, cache_usage, complete, eventually, metric, missed, pair, prompt, tokens_of, whole
from kvferryd.demo.fleet import DaemonService, Service

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
TTL_S = 10.0


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    prefill: dict[str, Any] = {"options": {"progressive": True}}
    options, policy = {"second_turn": True, "load_timeout_s": 10}, {"kv_load_failure_policy": "recompute"}
    decode: dict[str, Any] = {"options": options, "transfer": policy}
    with pair(prefill=prefill, decode=decode, daemon_flags=("--lease-ttl-s", str(TTL_S))) as both:
        yield both


def back(engines: Pair, dead: DaemonService, engine: Service) -> DaemonService:
    """The daemon started again, with its engine attached."""
    daemon = engines.fleet.again(dead)
    asyncio.run(engines.fleet.ready(daemon, timeout_s=30))
    assert eventually(lambda: "is there again" in engine.log.read_text())
    return daemon


def test_a_prefill_in_chunks_that_is_published_chunk_by_chunk(engines: Pair) -> None:
    tokens = prompt(1400)
    assert engines.handover(tokens) == engines.alone(tokens)
    assert engines.transfers()[-1].tokens == (0, whole(1400))


def test_the_second_turn_flows_back(engines: Pair) -> None:
    """Prefill reads what decode has generated, before it prefills what the user said next."""
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
    assert there.transfers()[-1].tokens == (128, whole(189))
    done = complete(engines.decode, second, kv_transfer_params=again.json()["kv_transfer_params"])
    assert tokens_of(done) == engines.alone(second)


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": "yes"}])
def test_params_that_mean_nothing_are_prefilled_here(engines: Pair, params: dict[str, object]) -> None:
    tokens, before = prompt(70, seed=3), missed(engines.decode, "refused")
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == engines.alone(tokens)
    assert eventually(lambda: missed(engines.decode, "refused") == before + 1)


def test_kv_that_has_expired_is_computed_again(engines: Pair) -> None:
    tokens, before = prompt(300, seed=4), missed(engines.decode, "failed")
    params = engines.prefilled(tokens)
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == engines.alone(tokens)
    assert engines.transfers()[-1].state == "failed"
    assert eventually(lambda: cache_usage(engines.decode) == 0)
    assert eventually(lambda: missed(engines.decode, "failed") == before + 1)
    assert "nothing was handed over (failed)" in engines.decode.log.read_text()


def test_the_kv_of_another_prompt_is_not_used_but_computed(engines: Pair) -> None:
    tokens = prompt(300, seed=15)
    params = engines.prefilled(prompt(300, seed=16))
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == engines.alone(tokens)
    error = engines.transfers()[-1].error
    assert error is not None
    assert error.code == "other_prompt"


def test_a_second_turn_of_another_conversation_is_computed(engines: Pair) -> None:
    """Generated tokens are bound to the KV as the prompt is."""
    first = prompt(150, seed=17)
    answer = complete(engines.decode, first, max_tokens=40, kv_transfer_params=engines.prefilled(first))
    back, said = answer.json()["kv_transfer_params"], tokens_of(answer)
    second = [*first, *said[:9], said[9] ^ 1, *said[10:], *prompt(50, seed=18)]
    refused = complete(engines.prefill, second, max_tokens=1, kv_transfer_params=back)
    assert refused.status_code >= 400  # this engine is to fail where the other is to compute
    there = Pair(engines.fleet, engines.decode, engines.prefill, engines.decode_daemons, engines.prefill_daemons)
    failed = there.transfers()[-1] if there.transfers()[-1].state == "failed" else there.transfers()[-2]
    assert failed.error is not None
    assert failed.error.code == "other_prompt"


def test_a_source_that_is_gone_costs_its_request_a_prefill(engines: Pair) -> None:
    tokens = prompt(90, seed=6)
    gone = PREFILL_LEG | {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_request_id": "x",
        "remote_host": "127.0.0.1", "remote_port": engines.fleet.free_port(),
    }  # fmt: skip
    once = tokens_of(complete(engines.decode, tokens, kv_transfer_params=gone))
    assert once == tokens_of(complete(engines.decode, tokens))


def test_what_an_engine_published_outlives_it(engines: Pair) -> None:
    tokens = prompt(222, seed=5)
    alone = engines.alone(tokens)
    params = engines.prefilled(tokens)
    # The answer does not wait for the daemon to hear of the lease.
    assert eventually(lambda: params["remote_request_id"] in {lease.request_id for lease in engines.leases()})
    engines.kill(engines.prefill)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=params)) == alone
    assert engines.transfers()[-1].state == "done"


def test_the_source_goes_on_when_a_reader_dies(engines: Pair) -> None:
    """It dies while it decodes, and another request's KV is kept for it: that lease ends by its time."""
    tokens, waiting = prompt(180, seed=8), prompt(190, seed=9)
    engines.start_again(engines.prefill)
    engines.prefilled(waiting)
    params = engines.prefilled(tokens)
    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(complete, engines.decode, tokens, max_tokens=3000, kv_transfer_params=params)
        assert eventually(lambda: metric(engines.decode, "num_requests_running") == 1)
        engines.kill(engines.decode)
        assert dying.exception() is not None
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    engines.start_again(engines.decode)
    assert engines.handover(tokens) == engines.alone(tokens)
    assert engines.transfers()[-1].state == "done"


def test_a_prefill_daemon_that_dies_is_missed_until_it_is_back(engines: Pair) -> None:
    tokens = prompt(230, seed=10)
    alone = engines.alone(tokens)
    published = engines.prefilled(tokens)
    dead = engines.prefill_daemons[0]
    dead.signal(signal.SIGKILL)
    dead.process.wait(60)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=published)) == alone
    assert engines.transfers()[-1].state == "failed"
    before, unheard = missed(engines.prefill, "unpublished"), prompt(50, seed=11)
    assert complete(engines.prefill, unheard, max_tokens=1, kv_transfer_params=PREFILL_LEG).status_code == 200
    assert eventually(lambda: missed(engines.prefill, "unpublished") > before)

    engines.prefill_daemons[0] = back(engines, dead, engines.prefill)
    again = prompt(240, seed=12)
    assert engines.handover(again) == engines.alone(again)
    assert engines.transfers()[-1].state == "done"
    assert engines.transfers()[-1].tokens == (0, whole(240))
    assert eventually(lambda: cache_usage(engines.prefill) == 0)


def test_a_decode_daemon_that_dies_is_missed_until_it_is_back(engines: Pair) -> None:
    tokens = prompt(250, seed=13)
    alone = engines.alone(tokens)
    dead = engines.decode_daemons[0]
    published = engines.prefilled(tokens)
    dead.signal(signal.SIGKILL)
    dead.process.wait(60)
    assert tokens_of(complete(engines.decode, tokens, kv_transfer_params=published)) == alone

    engines.decode_daemons[0] = back(engines, dead, engines.decode)
    again = prompt(260, seed=14)
    assert engines.handover(again) == engines.alone(again)
    assert engines.transfers()[-1].state == "done"
    assert engines.transfers()[-1].tokens == (0, whole(260))
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert eventually(lambda: cache_usage(engines.decode) == 0)


def test_an_engine_goes_on_without_its_daemon(engines: Pair) -> None:
    tokens = prompt(80, seed=7)
    before = tokens_of(complete(engines.decode, tokens))
    engines.decode_daemons[0].signal(signal.SIGKILL)
    engines.decode_daemons[0].process.wait(60)
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
