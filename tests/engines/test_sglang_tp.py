"""SGLang engines of other tensor parallelism on both sides, behind SGLang's router."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_engines import SglangPair, same, sglang_pair

from engines import MODEL, prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["two to one", "one to two"])
def pair(request: pytest.FixtureRequest) -> Iterator[SglangPair]:
    prefill, decode = request.param
    with sglang_pair(MODEL, prefill={"ranks": prefill}, decode={"ranks": decode, "page_size": 16}) as started:
        yield started


def test_other_tensor_parallelism_gets_a_single_engines_tokens(pair: SglangPair) -> None:
    same(pair, [prompt(length) for length in (5, 33, 100, 513, 700)], at_once=5)
