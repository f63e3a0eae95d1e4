"""Two vLLM engines of one shape: the decoded tokens are those of one engine alone, and nobody else is harmed.

kv_transfer_params belong to one prompt: sent with another, its KV is refused, and no cache keeps any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import (
    ANSWER_S,
    LENGTHS,
    PREFILL_LEG,
    Pair,
    Service,
    cache_usage,
    choices_of,
    complete,
    eventually,
    handed_over,
    missed,
    pair,
    prompt,
    tokens_of,
    told_by,
    whole,
)
from kvferry.digest import prompt_digest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    """Prefill as vLLM knows it by a plug-in's name, decode under the name that some routers and runtimes insist on."""
    checked = {
        "flags": ("--middleware", "kvferry.asgi.CheckTransferParams"), "transfer": {"kv_connector_module_path": None},
    }  # fmt: skip
    named = {"transfer": {"kv_connector": "NixlConnector"}}
    with pair(prefill=checked, decode=named, daemon_flags=("--lease-ttl-s", "60", "--deadline-s", "30")) as both:
        yield both


def test_the_tokens_depend_on_the_whole_prompt(engines: Pair) -> None:
    """Or equal tokens would say nothing about the KV that was moved."""
    tokens = prompt(700)
    assert engines.alone(tokens) != engines.alone([tokens[0] ^ 1, *tokens[1:]])


@pytest.mark.parametrize(
    "length",
    [pytest.param(length, marks=() if length in (5, 32, 513, 1300) else pytest.mark.long) for length in LENGTHS],
)
def test_a_request_alone(engines: Pair, length: int) -> None:
    tokens = prompt(length)
    assert engines.handover(tokens) == engines.alone(tokens)
    moved = engines.transfers()[-1]
    assert moved.state == "done"
    assert moved.tokens == (0, whole(length))


def test_decode_holds_what_prefill_computed_bit_for_bit(engines: Pair) -> None:
    """In whole blocks, whose slots vLLM's CPU backend mixes."""
    computed, moved = engines.rows_of_handover(prompt(1000, seed=5), 32)
    assert len(computed) == 32
    assert len(computed & moved) >= 31  # decode computes the last token anew


def test_eight_at_once(engines: Pair) -> None:
    handed_over(engines, [prompt(length, seed=1) for length in LENGTHS], at_once=8)


@pytest.mark.parametrize("length", [250, 400, 4000])
def test_a_request_id_may_be_longer_than_a_daemon_takes(engines: Pair, length: int) -> None:
    """vLLM makes it of the client's X-Request-Id. Two that begin alike are two requests."""
    prompts = [prompt(100, seed=8), prompt(100, seed=9)]
    params = [
        complete(engines.prefill, tokens, request_id="i" * length + last, max_tokens=1, kv_transfer_params=PREFILL_LEG)
        for tokens, last in zip(prompts, "ab", strict=True)
    ]
    for tokens, prefilled in zip(prompts, params, strict=True):
        moved = complete(
            engines.decode, tokens, request_id="j" * length, kv_transfer_params=prefilled.json()["kv_transfer_params"]
        )
        assert tokens_of(moved) == engines.alone(tokens)
        assert engines.transfers()[-1].state == "done"


SEVERAL: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7}


@pytest.mark.parametrize("length", [96, 200])
def test_several_answers_to_one_prompt_are_those_of_one_engine(engines: Pair, length: int) -> None:
    """Their KV is read once: each finds what the first has read, and computes the rest itself."""
    tokens = prompt(length, seed=10)
    before = len(engines.transfers())
    prefilled = complete(engines.prefill, tokens, max_tokens=1, kv_transfer_params=PREFILL_LEG, **SEVERAL)
    assert eventually(lambda: len(engines.leases()) == 1), engines.leases()  # three were published, and one is told
    params = prefilled.json()["kv_transfer_params"]
    moved = complete(engines.decode, tokens, kv_transfer_params=params, **SEVERAL)
    assert choices_of(moved) == choices_of(complete(engines.prefill, tokens, **SEVERAL))
    assert [one.state for one in engines.transfers()[before:]] == ["done"]
    assert eventually(lambda: not engines.leases())


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return dict(told_by("shared_leases.py"))


ONLY_A = {"load": ["a"], "cancel": [], "release": []}


def test_a_lease_is_not_ended_by_a_request_while_another_reads_it_nor_by_an_answer_to_the_same_prompt(
    told: dict[str, Any],
) -> None:
    assert told["answers to one prompt"] == [[True, False, False, False], ONLY_A | {"load": ["0_a"]}]
    assert told["another request leaves, waiting"] == told["another request leaves, queued"] == ONLY_A
    assert told["another request, late"] == [False, ONLY_A | {"release": ["b"]}]
    assert told["the last of them leaves"] == ONLY_A | {"release": ["b"]}


def test_a_lease_that_was_published_anew_is_read_though_the_one_before_has_been(told: dict[str, Any]) -> None:
    """Two leases of one name and one prompt have two numbers, as where a prefill engine takes the id of its client."""
    assert told["another request, with lease 1 after 1"] == [False, ONLY_A | {"release": ["b"]}]
    assert told["another request, with lease 2 after 1"] == [True, ONLY_A | {"load": ["a", "b"]}]


def test_a_lease_is_in_one_load_at_a_time_whatever_the_prompt(told: dict[str, Any]) -> None:
    """Also where vLLM has finished the request of the first, until that load has ended on all ranks."""
    only_b, cancelled = ONLY_A | {"load": ["b"]}, {"load": [], "cancel": ["a"], "release": []}
    assert told["another prompt, arrives"] == [[True, False, True], [ONLY_A, only_b]]
    assert told["another prompt, leaves"] == [[True, False, False, True], [ONLY_A, cancelled, only_b]]


def test_what_vllm_does_not_want_of_a_lease_is_left_out_at_its_end(told: dict[str, Any]) -> None:
    """vLLM cuts what it is offered to whole blocks of its own where it computes a window again."""
    assert told["fewer than there are"] == [[0, 16], 0, [1]]


def test_requests_of_vllm_without_a_server_are_not_answers_to_one_prompt(told: dict[str, Any]) -> None:
    """It names them 0, 1, ...; the answers to the prompt of request 0 are 0_0, 1_0, ..."""
    assert told["published as 0 and 1"] == []
    assert told["published as 0_0 and 1_0"] == ["0_0"]


def test_several_prompts_in_one_body_are_those_of_one_engine(engines: Pair) -> None:
    """As routers send them, with one kv_transfer_params. It is the first prompt's: decode prefills the others."""
    prompts = [prompt(length, seed=15) for length in (200, 90, 33)]
    before, skipped = len(engines.transfers()), missed(engines.decode, "several_prompts")
    prefilled = complete(engines.prefill, prompts, max_tokens=1, kv_transfer_params=PREFILL_LEG)
    assert eventually(lambda: len(engines.leases()) == 1), engines.leases()
    params = prefilled.json()["kv_transfer_params"]
    moved = complete(engines.decode, prompts, kv_transfer_params=params)
    assert choices_of(moved) == choices_of(complete(engines.prefill, prompts))
    assert [(one.state, one.tokens) for one in engines.transfers()[before:]] == [("done", (0, whole(200)))]
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: missed(engines.decode, "several_prompts") == skipped + 2)


def test_a_load_that_fails_fails_all_answers_to_its_prompt(engines: Pair) -> None:
    tokens = prompt(100, seed=11)
    assert complete(engines.decode, tokens, kv_transfer_params=NOBODY, **SEVERAL).status_code == 500
    assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_what_decode_has_already_is_not_moved(engines: Pair) -> None:
    first = prompt(100, seed=2)
    longer = first + prompt(60, seed=3)
    engines.handover(first)
    assert engines.handover(longer) == engines.alone(longer)
    assert engines.transfers()[-1].tokens == (96, 160)


def test_the_source_keeps_nothing_that_was_read(engines: Pair) -> None:
    engines.handover(prompt(200, seed=4))
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert eventually(lambda: cache_usage(engines.decode) == 0)


MALFORMED: list[dict[str, Any]] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": "yes"},
    {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]},
    {"do_remote_prefill": True, "remote_block_ids": [[10**30]], "remote_engine_id": "p"},
    {"do_remote_prefill": True, "remote_num_tokens": -1},
    {"do_remote_decode": {"a": 1}},
    {"do_remote_decode": True, "remote_engine_id": "p" * 100_000},
]
NOBODY = {
    "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "never", "remote_port": 9,
    "remote_host": "192.0.2.1",
}  # fmt: skip


@pytest.mark.parametrize("params", [*MALFORMED, NOBODY])
def test_params_that_mean_nothing_fail_their_own_request_only(engines: Pair, params: dict[str, Any]) -> None:
    tokens = prompt(40, seed=5)
    assert complete(engines.decode, tokens, kv_transfer_params=params).status_code >= 400
    assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


@pytest.mark.parametrize("params", [*MALFORMED, "do_remote_prefill"])
@pytest.mark.parametrize("where", ["body", "vllm_xargs"])
def test_with_the_middleware_malformed_params_are_the_clients_error(engines: Pair, params: Any, where: str) -> None:
    """vLLM passes vllm_xargs on as they are."""
    held = {"kv_transfer_params": params}
    answer = complete(engines.prefill, prompt(40), **(held if where == "body" else {"vllm_xargs": held}))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "malformed_kv_transfer_params"


def test_params_that_are_no_object_fail_their_own_request_only(engines: Pair) -> None:
    tokens = prompt(40, seed=6)
    answer = complete(engines.decode, tokens, vllm_xargs={"kv_transfer_params": "do_remote_prefill"})
    assert answer.status_code >= 400
    assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_more_tokens_than_were_published_fail_their_own_request_only(engines: Pair) -> None:
    tokens = prompt(90, seed=7)
    params = engines.prefilled(tokens[:40]) | {"remote_num_tokens": 90}
    assert complete(engines.decode, tokens, kv_transfer_params=params).status_code >= 400
    assert engines.handover(tokens) == engines.alone(tokens)


@pytest.mark.anyio
async def test_an_abort_of_a_load_gives_its_blocks_back(engines: Pair) -> None:
    """The KV of a request that was never prefilled is waited for; with its transfer under way the client leaves."""
    params = engines.prefilled(prompt(70, seed=8)) | {"remote_request_id": "not-yet"}
    body = {"model": "m", "prompt": prompt(70, seed=8), "max_tokens": 4, "kv_transfer_params": params}

    def states() -> list[str]:
        return [str(moved.state.value) for moved in engines.transfers() if moved.request_id == "not-yet"]

    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as http:
        asking = asyncio.create_task(http.post(f"{engines.decode.url}/v1/completions", json=body))
        assert await asyncio.to_thread(eventually, lambda: len(states()) == 1)
        asking.cancel()
        await asyncio.wait([asking])
    assert await asyncio.to_thread(eventually, lambda: "aborted" in states())
    assert await asyncio.to_thread(eventually, lambda: cache_usage(engines.decode) == 0)


@pytest.mark.parametrize("first", ["the order", "the request"])
def test_a_router_orders_by_request_id(engines: Pair, first: str) -> None:
    """The decode engine is told no address: it reserves blocks, and the router tells its daemon where to read."""
    tokens = prompt(210, seed=12 + len(first))
    params = engines.prefilled(tokens)
    request_id, source = params["remote_request_id"], {
        "engine_id": params["remote_engine_id"], "address": f"{params['remote_host']}:{params['remote_port']}",
        "epoch": params["remote_epoch"],
    }  # fmt: skip
    asked = {"do_remote_prefill": True, "remote_request_id": request_id, "order": "router"}
    order = {"request_id": request_id, "source": source}
    daemon = f"{engines.decode_daemons[0].url}/v1/transfers"
    with ThreadPoolExecutor(1) as pool:
        if first == "the order":
            assert httpx.post(daemon, json=order, trust_env=False).status_code == 202
        answer = pool.submit(complete, engines.decode, tokens, kv_transfer_params=asked)
        if first == "the request":
            assert eventually(lambda: engines.transfers()[-1].request_id == request_id)
            assert httpx.post(daemon, json=order, trust_env=False).status_code in {200, 202}
        assert tokens_of(answer.result()) == engines.alone(tokens)
    moved = engines.transfers()[-1]
    assert (moved.request_id, moved.state, moved.tokens) == (request_id, "done", (0, 210))


@pytest.mark.long
def test_a_request_that_no_router_orders_fails_alone(engines: Pair) -> None:
    asked = {"do_remote_prefill": True, "remote_request_id": "never-ordered", "order": "router"}
    tokens = prompt(40, seed=13)
    answer = complete(engines.decode, tokens, kv_transfer_params=asked)
    assert answer.status_code >= 400
    assert engines.handover(tokens) == engines.alone(tokens)


def test_a_decode_that_needs_nothing_tells_the_source(engines: Pair) -> None:
    """remote_num_tokens = 0: everything is computed here, and the lease ends all the same."""
    tokens = prompt(50, seed=9)
    params = engines.prefilled(tokens)
    done = complete(engines.decode, tokens, kv_transfer_params=params | {"remote_num_tokens": 0})
    assert tokens_of(done) == engines.alone(tokens)
    assert eventually(lambda: params["remote_request_id"] not in {lease.request_id for lease in engines.leases()})


def test_a_handover_carries_the_epoch_and_the_lease_and_its_record_has_the_attempt(engines: Pair) -> None:
    moved = []
    for seed in (50, 51):
        tokens = prompt(90, seed=seed)
        params = engines.prefilled(tokens)
        (lease,) = [each for each in engines.leases() if each.request_id == params["remote_request_id"]]
        assert (lease.epoch, lease.lease) == (params["remote_epoch"], params["remote_lease"])
        assert complete(engines.decode, tokens, kv_transfer_params=params).status_code == 200
        moved.append(engines.transfers()[-1])
        assert moved[-1].source is not None and moved[-1].request_id == lease.request_id
        assert (moved[-1].source.epoch, moved[-1].source.lease, moved[-1].lease) == (lease.epoch, *2 * (lease.lease,))
    assert 0 < moved[0].attempt < moved[1].attempt


def test_the_prefill_answer_has_what_routers_pass_on(engines: Pair) -> None:
    params = engines.prefilled(prompt(77, seed=10))
    wanted = {*PREFILL_LEG, "remote_request_id", "remote_num_tokens", "remote_epoch", "remote_lease", "tp_size"}
    assert wanted <= set(params)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_num_tokens"] == 77
    assert len(params["remote_block_ids"]) == 1


@pytest.fixture(scope="module", params=["engine", "router"])
def proxy(request: pytest.FixtureRequest, engines: Pair) -> Service:
    started = engines.fleet.proxy(
        engines.prefill, engines.decode, prefill_daemons=engines.prefill_daemons, decode_daemons=engines.decode_daemons,
        order=request.param,
    )  # fmt: skip
    asyncio.run(engines.fleet.ready(started, timeout_s=30))
    return started


def test_behind_the_proxy(engines: Pair, proxy: Service) -> None:
    before, others = len(engines.transfers()), {lease.request_id for lease in engines.leases()}
    prompts = [prompt(60 + 150 * i, seed=100 + before) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tokens: complete(proxy, tokens), prompts))
    assert [tokens_of(answer) for answer in answers] == [engines.alone(tokens) for tokens in prompts]
    assert len(engines.transfers()) == before + 4
    several = [prompt(length, seed=100 + before) for length in (150, 40)]
    assert choices_of(complete(proxy, several)) == [engines.alone(tokens) for tokens in several]
    assert len(engines.transfers()) == before + 5
    assert eventually(lambda: {lease.request_id for lease in engines.leases()} <= others)


LENGTH = 200


def ask(url: str, request_id: str, tokens: object, **more: object) -> httpx.Response:
    body = {
        "model": "m", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    with httpx.Client(trust_env=False, timeout=ANSWER_S, headers={"X-Request-Id": request_id}) as http:
        return http.post(f"{url}/v1/completions", json=body | more)


def test_another_prompt_of_the_same_length_is_refused(engines: Pair) -> None:
    first, other = prompt(LENGTH, seed=61), prompt(LENGTH, seed=62)
    params = engines.prefilled(first)
    assert complete(engines.decode, other, kv_transfer_params=params).status_code >= 400
    assert next(moved.error.code for moved in reversed(engines.transfers()) if moved.error) == "other_prompt"
    # Nothing of it is in the prefix cache, and the prompt that it belongs to can still read it.
    assert tokens_of(complete(engines.decode, other)) == engines.alone(other)
    assert tokens_of(complete(engines.decode, first, kv_transfer_params=params)) == engines.alone(first)
    assert engines.transfers()[-1].state == "done"


@pytest.mark.parametrize(("published", "asked"), [(LENGTH, LENGTH - 40), (LENGTH - 40, LENGTH)])
def test_another_prompt_of_another_length_is_refused(engines: Pair, published: int, asked: int) -> None:
    tokens = prompt(asked, seed=63)
    params = engines.prefilled(prompt(published, seed=64))
    assert complete(engines.decode, tokens, kv_transfer_params=params).status_code >= 400
    assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_a_single_other_token_is_refused(engines: Pair) -> None:
    first = prompt(LENGTH, seed=65)
    other = [*first[:7], first[7] ^ 1, *first[8:]]
    assert complete(engines.decode, other, kv_transfer_params=engines.prefilled(first)).status_code >= 400
    assert tokens_of(complete(engines.decode, other)) == engines.alone(other)


def test_a_prompt_that_goes_on_where_the_other_ends_reads_it(engines: Pair) -> None:
    first = prompt(100, seed=66)
    longer = first + prompt(60, seed=67)
    done = complete(engines.decode, longer, kv_transfer_params=engines.prefilled(first))
    assert tokens_of(done) == engines.alone(longer)
    assert engines.transfers()[-1].state == "done"


def test_several_prompts_with_the_params_of_one_never_decode_from_the_wrong_kv(engines: Pair) -> None:
    """Their requests are loaded at once and in any order."""
    prompts = [prompt(LENGTH, seed=70 + i) for i in range(3)]
    answer = ask(engines.decode.url, "several", prompts, kv_transfer_params=engines.prefilled(prompts[1]))
    assert answer.status_code >= 400
    for tokens in prompts:
        assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_the_middleware_lets_several_prompts_with_params_through(engines: Pair) -> None:
    for prompts in ([prompt(20), prompt(21)], [prompt(20)]):
        assert ask(engines.prefill.url, "several", prompts, kv_transfer_params=PREFILL_LEG).status_code == 200


def test_a_request_id_may_come_again_with_another_prompt(engines: Pair, proxy: Service) -> None:
    for seed in range(80, 84):
        tokens = prompt(LENGTH, seed=seed)
        answer = ask(proxy.url, "the-same", tokens)
        assert tokens_of(answer) == engines.alone(tokens, max_tokens=8)
        assert answer.headers["x-request-id"] == "the-same"


def test_a_request_id_may_come_with_other_prompts_at_once(engines: Pair, proxy: Service) -> None:
    prompts = [prompt(LENGTH, seed=seed) for seed in range(90, 94)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tokens: ask(proxy.url, "at-once", tokens), prompts))
    assert [tokens_of(one) for one in answers] == [engines.alone(tokens, max_tokens=8) for tokens in prompts]
    for tokens in prompts:
        assert tokens_of(complete(engines.decode, tokens)) == engines.alone(tokens)


def test_what_changes_the_kv_changes_the_digest(tmp_path: Path) -> None:
    """vLLM's own requests have images, adapters, embeddings; a change of no KV changes no digest."""
    digests = told_by("request_digests.py", tmp_path)
    text = prompt_digest(range(100, 115)).hex()
    same = {name: digest for name, digest in digests.items() if digest == text}
    assert set(same) == {"text", "another name", "an image after these tokens"}
    assert digests["adapter"] == digests["the adapter from elsewhere"]
    assert digests["counted"] == digests["counted otherwise"]
    assert len({digest for name, digest in digests.items() if name not in same}) == len(digests) - len(same) - 2
