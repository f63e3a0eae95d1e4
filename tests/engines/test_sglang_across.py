"""SGLang prefills and vLLM goes on: two real engines, two attention implementations, two layouts, one model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from sglang_engines import START_S, SglangEngine, generate, room, sglang_fleet

from engines import MODEL, PYTHON, complete, prompt, tokens_of, transfers_at
from kvferry.schemas import TransferState
from kvferryd.demo.fleet import DaemonService, Service

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]
LENGTHS = [5, 31, 33, 100, 257, 513, 1000]


@dataclass(frozen=True)
class Across:
    sglang: SglangEngine
    vllm: Service
    daemon: DaemonService
    """vLLM's."""
    single: Service
    """The reference engine, alone."""

    def handover(self, tokens: Sequence[int]) -> list[int]:
        """Both legs at once: SGLang answers when its KV has been read."""
        where = room(self.sglang)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(generate, self.sglang, tokens, **where)
            moved = complete(self.vllm, tokens, kv_transfer_params=self.params(where, len(tokens)))
            assert prefilled.result().status_code == 200, prefilled.result().text
        return tokens_of(moved)

    def params(self, where: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """What vLLM needs to know of SGLang's room."""
        host, _, port = self.sglang.daemons[0].peer.rpartition(":")
        return {
            "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": f"room-{where['bootstrap_room']}",
            "remote_host": host, "remote_port": int(port), "remote_num_tokens": num_tokens,
        }  # fmt: skip

    def alone(self, tokens: Sequence[int]) -> list[int]:
        return tokens_of(complete(self.single, tokens))


@pytest.fixture(scope="module")
def across() -> Iterator[Across]:
    """SGLang in pages of 16, token by token; vLLM in blocks of 32, keys transposed in each. Both derive the model's
    fingerprint."""
    if not PYTHON.exists():
        pytest.skip("there is no vLLM here: make engines-venv installs one")
    with sglang_fleet(MODEL) as fleet:
        sglang = fleet.sglang("p", mode="prefill", page_size=16)
        (daemon,) = fleet.daemons("v", 1)
        asyncio.run(fleet.ready(daemon, timeout_s=START_S))
        vllm = fleet.vllm("v", fleet.directory / "model", [daemon])
        single = fleet.engine("single")
        asyncio.run(fleet.ready(sglang, vllm, single, timeout_s=START_S))
        yield Across(sglang, vllm, daemon, single)


def test_vllm_goes_on_with_a_single_engines_tokens(across: Across) -> None:
    for length in LENGTHS:
        tokens = prompt(length, seed=40)
        assert across.handover(tokens) == across.alone(tokens)
        transfer = transfers_at(across.daemon)[-1]
        assert transfer.state is TransferState.DONE
        assert transfer.bytes


def test_several_at_once(across: Across) -> None:
    prompts = [prompt(40 + 90 * i, seed=41) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(across.handover, prompts)) == [across.alone(tokens) for tokens in prompts]


def test_another_prompt_is_refused(across: Across) -> None:
    """Both compute the same digest, of tokens that one has published and the other expects."""
    where = room(across.sglang)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, across.sglang, prompt(150, seed=42), **where)
        params = across.params(where, 150)
        assert complete(across.vllm, prompt(150, seed=43), kv_transfer_params=params).status_code >= 400
        assert prefilled.result().status_code == 500
    assert "other_prompt" in str(transfers_at(across.daemon)[-1].error)
