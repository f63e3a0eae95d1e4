"""kv_transfer_params belong to one prompt, request ids to nobody: wrong tokens never come with HTTP 200."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from stage import Stage

from kvferryd.demo.fleet import Service

pytestmark = pytest.mark.xdist_group("stage")

LENGTH = 75
PUBLISH = {"do_remote_decode": True}


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(300), k=length)


def ask(service: Service, tokens: object, request_id: str = "", max_tokens: int = 7, **more: Any) -> httpx.Response:
    body = {"prompt": tokens, "max_tokens": max_tokens, "return_token_ids": True, "ignore_eos": True, **more}
    headers = {"X-Request-Id": request_id} if request_id else {}
    return httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def prefilled(stage: Stage, tokens: Sequence[int]) -> dict[str, Any]:
    params = ask(stage.prefill, tokens, max_tokens=1, kv_transfer_params=PUBLISH).json()["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


def received(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["received_tokens"])


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_another_prompt_of_the_same_length_is_refused(stage: Stage) -> None:
    first, other = prompt(1), prompt(2)
    params = prefilled(stage, first)
    assert refused(ask(stage.decode, other, kv_transfer_params=params)) == (400, "other_prompt")
    # Nothing of it is in the prefix cache, and the prompt that it belongs to can still read it.
    assert tokens_of(ask(stage.decode, other)) == tokens_of(ask(stage.alone, other))
    answer = ask(stage.decode, first, kv_transfer_params=params)
    assert tokens_of(answer) == tokens_of(ask(stage.alone, first))
    assert received(answer) == LENGTH


@pytest.mark.parametrize(("published", "asked"), [(LENGTH, LENGTH - 20), (LENGTH - 20, LENGTH)])
def test_another_prompt_of_another_length_is_refused(stage: Stage, published: int, asked: int) -> None:
    tokens = prompt(3, asked)
    params = prefilled(stage, prompt(4, published))
    answer = ask(stage.decode, tokens, kv_transfer_params=params)
    assert refused(answer) == (400, "other_prompt")
    if published > asked:  # known without a daemon
        assert answer.json()["error"]["param"] == "kv_transfer_params.remote_num_tokens"
    assert tokens_of(ask(stage.decode, tokens)) == tokens_of(ask(stage.alone, tokens))


def test_a_prompt_that_is_all_cached_does_not_end_anothers_lease(stage: Stage) -> None:
    """Nothing is to be read, so the source is told that the request is over: its own request, no other."""
    first, other = prompt(5), prompt(6)
    ask(stage.decode, other)
    params = prefilled(stage, first)
    ask(stage.decode, other, kv_transfer_params=params)
    answer = ask(stage.decode, first, kv_transfer_params=params)
    assert tokens_of(answer) == tokens_of(ask(stage.alone, first))
    assert received(answer) == LENGTH


def test_an_engine_that_computes_what_it_cannot_load_computes_its_own_prompt(stage: Stage) -> None:
    other = prompt(7)
    answer = ask(stage.bare, other, kv_transfer_params=prefilled(stage, prompt(8)))
    assert tokens_of(answer) == tokens_of(ask(stage.alone, other))
    assert received(answer) == 0


def test_a_second_turn_of_another_conversation_is_refused(stage: Stage) -> None:
    """Tokens that decode has generated are bound, too."""
    tokens = prompt(9)
    asked = {"do_remote_decode": True} | prefilled(stage, tokens) | {"do_remote_decode": True}
    answer = ask(stage.decode, tokens, max_tokens=10, kv_transfer_params=asked)
    back, generated = answer.json()["kv_transfer_params"], tokens_of(answer)
    assert back["remote_num_tokens"] == LENGTH + 9
    said = [*generated[:4], generated[4] ^ 1, *generated[5:]]
    other, following = [*tokens, *said, *prompt(10, 20)], [*tokens, *generated, *prompt(10, 20)]
    assert refused(ask(stage.prefill, other, kv_transfer_params=back | {"do_remote_prefill": True})) == (
        400, "other_prompt",
    )  # fmt: skip
    right = ask(stage.prefill, following, kv_transfer_params=back | {"do_remote_prefill": True})
    assert tokens_of(right) == tokens_of(ask(stage.alone, following))


def test_the_params_of_several_prompts_are_those_of_the_first(stage: Stage) -> None:
    prompts = [prompt(20 + i) for i in range(3)]
    answer = ask(stage.decode, prompts, kv_transfer_params=prefilled(stage, prompts[0]))
    assert answer.status_code == 200, answer.text
    tokens = [choice["token_ids"] for choice in answer.json()["choices"]]
    assert tokens == [tokens_of(ask(stage.alone, alone)) for alone in prompts]
    assert received(answer) == LENGTH


def test_the_params_of_a_later_prompt_are_refused(stage: Stage) -> None:
    prompts = [prompt(24 + i) for i in range(3)]
    answer = ask(stage.decode, prompts, kv_transfer_params=prefilled(stage, prompts[1]))
    assert refused(answer) == (400, "other_prompt")
    for tokens in prompts:
        assert tokens_of(ask(stage.decode, tokens)) == tokens_of(ask(stage.alone, tokens))


@pytest.mark.parametrize("order", ["engine", "router"])
def test_a_request_id_may_come_again_with_another_prompt(stage: Stage, order: str) -> None:
    for seed in range(30, 34):
        tokens = prompt(seed)
        answer = ask(stage.bare_proxies[order], tokens, "the-same")
        assert tokens_of(answer) == tokens_of(ask(stage.alone, tokens))
        assert received(answer) == LENGTH
        assert answer.headers["x-request-id"] == "the-same"


@pytest.mark.parametrize("order", ["engine", "router"])
def test_a_request_id_may_come_with_other_prompts_at_once(stage: Stage, order: str) -> None:
    prompts = [prompt(seed + 10 * len(order)) for seed in range(40, 48)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda tokens: ask(stage.bare_proxies[order], tokens, "at-once"), prompts))
    expected = [tokens_of(ask(stage.alone, tokens)) for tokens in prompts]
    assert [tokens_of(answer) for answer in answers] == expected
    assert [received(answer) for answer in answers] == [LENGTH] * len(prompts)


@pytest.mark.parametrize("order", ["engine", "router"])
def test_an_id_as_long_as_the_proxy_takes_is_short_enough_for_the_engines(stage: Stage, order: str) -> None:
    tokens, request_id = prompt(50 + len(order)), "x" * 256
    answer = ask(stage.bare_proxies[order], tokens, request_id)
    assert tokens_of(answer) == tokens_of(ask(stage.alone, tokens))
    assert answer.headers["x-request-id"] == request_id


def test_a_request_id_may_come_again_without_a_proxy(stage: Stage) -> None:
    """The engines use the client's id as it is: for its second prompt it is a new attempt, which moves bytes again."""
    for seed in range(60, 64):
        tokens = prompt(seed)
        deadline = time.monotonic() + 20
        # The lease before has the same name. The engine can only be asked again.
        while (first := ask(stage.prefill, tokens, "again", 1, kv_transfer_params=PUBLISH)).status_code == 409:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        params = first.json()["kv_transfer_params"]
        answer = ask(stage.bare, tokens, "again", kv_transfer_params=params)
        assert tokens_of(answer) == tokens_of(ask(stage.alone, tokens))
        assert received(answer) == LENGTH
