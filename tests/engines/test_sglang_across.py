"""SGLang, vLLM and the reference engine go on with what another of them has prefilled: three attention
implementations, three layouts, one model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from sglang_engines import ROOMS, START_S, SglangEngine, SglangFleet, generate, room, sglang_fleet
from sglang_engines import tokens_of as sglang_tokens_of

from engines import MODEL, PREFILL_LEG, PYTHON, complete, eventually, leases_at, prompt, tokens_of, transfers_at
from kvferry.schemas import EngineList, TransferRecord, TransferState
from kvferryd.demo.fleet import DaemonService, Service

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]
LENGTHS = [5, 31, 33, 100, 257, 513, 1000]


@dataclass(frozen=True)
class Engine:
    service: Service
    daemon: DaemonService


@dataclass(frozen=True)
class Engines:
    """By name. SGLang p prefills and SGLang d decodes, vLLM and the reference engine do both. single is the reference
    engine, alone."""

    by_name: dict[str, Engine]
    single: Service


@dataclass(frozen=True)
class Way:
    prefill: Engine
    decode: Engine
    single: Service

    def handover(self, tokens: Sequence[int]) -> list[int]:
        if isinstance(self.prefill.service, SglangEngine):
            return self._from_sglang(tokens)
        return sglang_tokens_of(self.decoded(tokens, self.prefilled(tokens)))

    def _from_sglang(self, tokens: Sequence[int]) -> list[int]:
        """Both legs at once: SGLang answers when its KV has been read."""
        where = room(self._sglang)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(generate, self.prefill.service, tokens, **where)
            moved = complete(self.decode.service, tokens, kv_transfer_params=self.params(where, len(tokens)))
            assert prefilled.result().status_code == 200, prefilled.result().text
        return tokens_of(moved)

    @property
    def _sglang(self) -> SglangEngine:
        assert isinstance(self.prefill.service, SglangEngine)
        return self.prefill.service

    def params(self, where: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The part of SGLang's room that others need to know."""
        host, _, port = self.prefill.daemon.peer.rpartition(":")
        return {
            "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": f"room-{where['bootstrap_room']}",
            "remote_host": host, "remote_port": int(port), "remote_num_tokens": num_tokens,
        }  # fmt: skip

    def prefilled(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The kv_transfer_params of another engine's answer."""
        answer = complete(self.prefill.service, tokens, max_tokens=1, kv_transfer_params=PREFILL_LEG)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["kv_transfer_params"])

    def decoded(self, tokens: Sequence[int], params: dict[str, Any], **more: Any) -> httpx.Response:
        """SGLang goes on: they are JSON text in its request."""
        handed_over = {"bootstrap_room": next(ROOMS), "custom": {"kv_transfer_params": json.dumps(params)}}
        return generate(self.decode.service, tokens, **handed_over | more)

    def same(self, tokens: Sequence[int]) -> None:
        assert self.handover(tokens) == self.alone(tokens)

    def alone(self, tokens: Sequence[int]) -> list[int]:
        return tokens_of(complete(self.single, tokens))

    def transfers(self) -> list[TransferRecord]:
        return transfers_at(self.decode.daemon)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """SGLang in pages of 16 and of 32, token by token; vLLM in blocks of 32, keys transposed in each; the reference
    engine in blocks of 24, head by head. SGLang and vLLM derive the model's fingerprint, the reference is given it."""
    if not PYTHON.exists():
        pytest.skip("there is no vLLM here: make engines-venv installs one")
    with sglang_fleet(MODEL) as fleet:
        prefill = fleet.sglang("p", mode="prefill", page_size=16)
        decode = fleet.sglang("d", mode="decode", page_size=32)
        daemons = *fleet.daemons("v", 1), *fleet.daemons("r", 1)
        single = fleet.engine("single")
        _up(fleet, *daemons)
        vllm = fleet.vllm("v", fleet.directory / "model", [daemons[0]])
        _up(fleet, prefill, decode, vllm, single)
        same = ("--fingerprint", _fingerprint(prefill.daemons[0]))
        reference = fleet.engine("r", layout="HND", block_size=24, daemons=[daemons[1]], flags=same)
        _up(fleet, reference)
        by_name = {
            "SGLang p": Engine(prefill, prefill.daemons[0]), "SGLang d": Engine(decode, decode.daemons[0]),
            "vLLM": Engine(vllm, daemons[0]), "reference": Engine(reference, daemons[1]),
        }  # fmt: skip
        yield Engines(by_name, single)


def _up(fleet: SglangFleet, *services: Service) -> None:
    asyncio.run(fleet.ready(*services, timeout_s=START_S))


def _fingerprint(daemon: DaemonService) -> str:
    """The fingerprint of the model that its engine serves."""
    answer = httpx.get(f"{daemon.url}/v1/engines", trust_env=False)
    (record,) = EngineList.model_validate(answer.json()).engines
    return str(record.manifest["model"]["fingerprint"])


@pytest.fixture(params=["SGLang p to vLLM", "SGLang p to reference", "vLLM to SGLang d", "reference to SGLang d"])
def way(request: pytest.FixtureRequest, engines: Engines) -> Way:
    return _way(engines, request.param)


@pytest.fixture
def to_sglang(engines: Engines) -> Way:
    return _way(engines, "vLLM to SGLang d")


def _way(engines: Engines, named: str) -> Way:
    prefill, decode = (engines.by_name[name] for name in named.split(" to "))
    return Way(prefill, decode, engines.single)


def test_the_tokens_are_a_single_engines(way: Way) -> None:
    for length in LENGTHS:
        way.same(prompt(length, seed=40))
        transfer = way.transfers()[-1]
        assert transfer.state is TransferState.DONE
        assert transfer.bytes
    assert eventually(lambda: not leases_at(way.prefill.daemon))


def test_several_at_once(way: Way) -> None:
    prompts = [prompt(40 + 90 * i, seed=41) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(way.handover, prompts)) == [way.alone(tokens) for tokens in prompts]


@pytest.mark.long
def test_another_prompt_is_refused_by_vllm(engines: Engines) -> None:
    """Both compute the same digest, of tokens that one has published and the other expects."""
    way = _way(engines, "SGLang p to vLLM")
    where = room(way._sglang)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, way.prefill.service, prompt(150, seed=42), **where)
        params = way.params(where, 150)
        assert complete(way.decode.service, prompt(150, seed=43), kv_transfer_params=params).status_code >= 400
        assert prefilled.result().status_code == 500
    assert "other_prompt" in str(way.transfers()[-1].error)


def test_another_prompt_is_refused_by_sglang(to_sglang: Way) -> None:
    params = to_sglang.prefilled(prompt(150, seed=44))
    for length, code in ((150, "other_prompt"), (149, "other_prompt"), (151, "unsupported_request")):
        refused = to_sglang.decoded(prompt(length, seed=45), params)
        assert refused.status_code == 500
        assert code in refused.text
    assert sglang_tokens_of(to_sglang.decoded(prompt(150, seed=44), params)) == to_sglang.alone(prompt(150, seed=44))


@pytest.mark.parametrize(
    ("changed", "more", "said"),
    [
        ({"remote_first_token": MODEL.vocab_size}, {}, "vocabulary"),
        ({"remote_first_token": None}, {}, "remote_first_token"),
        ({"remote_port": "7411"}, {}, "remote_port"),
        ({"do_remote_prefill": False}, {}, "a source"),
        ({}, {"bootstrap_room": 0}, "bootstrap_room"),
        ({}, {"bootstrap_room": 1 << 63}, "bootstrap_room"),
        ({}, {"return_logprob": True}, "return_logprob"),
        ({}, {"custom": {"kv_transfer_params": "{"}}, "kv_transfer_params"),
        ({}, {"custom": None}, "bootstrap_host"),
        ({}, {"bootstrap_host": "handed-over", "bootstrap_port": 0, "custom": None}, "bootstrap_host"),
    ],
)
def test_what_sglang_cannot_follow_fails_by_itself(
    to_sglang: Way, changed: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    """Its own request: the others go on."""
    tokens = prompt(70, seed=46)
    params = to_sglang.prefilled(tokens)
    refused = to_sglang.decoded(tokens, params | changed, **more)
    assert refused.status_code == 500
    assert said in refused.text
    assert sglang_tokens_of(to_sglang.decoded(tokens, params)) == to_sglang.alone(tokens)
