"""kv_transfer_params belong to one prompt: sent with another, its KV is refused, and no cache keeps any of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engines import ANSWER_S, PREFILL_LEG, PYTHON, START_S, Pair, Service, complete, pair, prompt, tokens_of
from kvferry.digest import prompt_digest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
LENGTH = 200


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    """The prefill engine checks bodies, the decode engine does not: what gets past the check must be refused too."""
    checked = {"flags": ("--middleware", "kvferry.asgi.CheckTransferParams")}
    with pair(prefill=checked, daemon_flags=("--lease-ttl-s", "60", "--deadline-s", "30")) as both:
        yield both


def ask(url: str, request_id: str, tokens: object, **more: object) -> httpx.Response:
    body = {
        "model": "m", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    with httpx.Client(trust_env=False, timeout=ANSWER_S, headers={"X-Request-Id": request_id}) as http:
        return http.post(f"{url}/v1/completions", json=body | more)


def test_another_prompt_of_the_same_length_is_refused(engines: Pair) -> None:
    first, other = prompt(LENGTH, seed=1), prompt(LENGTH, seed=2)
    params = engines.prefilled(first)
    assert complete(engines.decode, other, kv_transfer_params=params).status_code >= 400
    assert {moved.error.code for moved in engines.transfers() if moved.error} == {"other_prompt"}
    # Nothing of it is in the prefix cache, and the prompt that it belongs to can still read it.
    assert tokens_of(complete(engines.decode, other)) == engines.alone(other)
    assert tokens_of(complete(engines.decode, first, kv_transfer_params=params)) == engines.alone(first)
    assert engines.transfers()[-1].state == "done"


@pytest.mark.parametrize(("published", "asked"), [(LENGTH, LENGTH - 40), (LENGTH - 40, LENGTH)])
def test_another_prompt_of_another_length_is_refused(engines: Pair, published: int, asked: int) -> None:
    tokens = prompt(asked, seed=3)
    params = engines.prefilled(prompt(published, seed=4))
    assert complete(engines.decode, tokens, kv_transfer_params=params).status_code >= 400
    assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_a_single_other_token_is_refused(engines: Pair) -> None:
    first = prompt(LENGTH, seed=5)
    other = [*first[:7], first[7] ^ 1, *first[8:]]
    assert complete(engines.decode, other, kv_transfer_params=engines.prefilled(first)).status_code >= 400
    assert tokens_of(complete(engines.decode, other)) == engines.alone(other)


def test_a_prompt_that_goes_on_where_the_other_ends_reads_it(engines: Pair) -> None:
    first = prompt(100, seed=6)
    longer = first + prompt(60, seed=7)
    done = complete(engines.decode, longer, kv_transfer_params=engines.prefilled(first))
    assert tokens_of(done) == engines.alone(longer)
    assert engines.transfers()[-1].state == "done"


def test_several_prompts_with_the_params_of_one_never_decode_from_the_wrong_kv(engines: Pair) -> None:
    """Their requests are loaded at once and in any order."""
    prompts = [prompt(LENGTH, seed=10 + i) for i in range(3)]
    answer = ask(engines.decode.url, "several", prompts, kv_transfer_params=engines.prefilled(prompts[1]))
    assert answer.status_code >= 400
    for tokens in prompts:
        assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_the_middleware_lets_several_prompts_with_params_through(engines: Pair) -> None:
    for prompts in ([prompt(20), prompt(21)], [prompt(20)]):
        assert ask(engines.prefill.url, "several", prompts, kv_transfer_params=PREFILL_LEG).status_code == 200


@pytest.fixture(scope="module", params=["engine", "router"])
def proxy(request: pytest.FixtureRequest, engines: Pair) -> Service:
    started = engines.fleet.proxy(
        engines.prefill, engines.decode, prefill_daemons=engines.prefill_daemons, decode_daemons=engines.decode_daemons,
        order=request.param,
    )  # fmt: skip
    asyncio.run(engines.fleet.ready(started, timeout_s=30))
    return started


def test_a_request_id_may_come_again_with_another_prompt(engines: Pair, proxy: Service) -> None:
    for seed in range(20, 24):
        tokens = prompt(LENGTH, seed=seed)
        answer = ask(proxy.url, "the-same", tokens)
        assert tokens_of(answer) == engines.alone(tokens, max_tokens=8)
        assert answer.headers["x-request-id"] == "the-same"


def test_a_request_id_may_come_with_other_prompts_at_once(engines: Pair, proxy: Service) -> None:
    prompts = [prompt(LENGTH, seed=seed) for seed in range(30, 34)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tokens: ask(proxy.url, "at-once", tokens), prompts))
    assert [tokens_of(one) for one in answers] == [engines.alone(tokens, max_tokens=8) for tokens in prompts]
    for tokens in prompts:
        assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_what_changes_the_kv_changes_the_digest(tmp_path: Path) -> None:
    """vLLM's own requests have images, adapters, embeddings; a change of no KV changes no digest."""
    script = Path(__file__).with_name("request_digests.py")
    done = subprocess.run([PYTHON, script, tmp_path], timeout=START_S, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    digests = json.loads(done.stdout.splitlines()[-1])
    text = prompt_digest(range(100, 115)).hex()
    same = {name: digest for name, digest in digests.items() if digest == text}
    assert set(same) == {"text", "another name", "an image after these tokens"}
    assert digests["adapter"] == digests["the adapter from elsewhere"]
    assert len({digest for name, digest in digests.items() if name not in same}) == len(digests) - len(same) - 1
