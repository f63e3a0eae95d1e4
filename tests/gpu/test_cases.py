"""Every case of `kvferry bench gpu`, small: each way that the pair can take, every word compared with the oracle."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from needs import GPUS

# isort: split
from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferryd.bench.gpu import flags
from kvferryd.bench.gpu_cases import TINY, Case, cases
from kvferryd.bench.gpu_engines import Engine, Stage
from kvferryd.bench.gpu_measure import measure
from kvferryd.demo.fleet import Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
CASES = cases(TINY, len(GPUS))
WAYS = ("mapped", "staged", "direct", "auto")


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        stage = Stage(fleet, GPUS, max(case.pair.source.tp for case in CASES))
        for way in WAYS:
            stage.add(way, *flags(way, 64), max(case.pair.destination.tp for case in CASES))
        await stage.ready()
        yield stage


async def refusal(way: str, reader: Engine) -> str:
    """Why the pair cannot take this way, as its daemon tells it; empty when it could."""
    async with RouterClient(reader.daemons[0].url) as router:
        return next((peer.ways[way] for peer in await router.peers() if peer.ways.get(way)), "")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
async def test_every_word_arrives(stage: Stage, case: Case, name: str) -> None:
    way = next(way for way in stage.ways if way.name == name)
    assert not way.refused
    sources, readers = await stage.open(case.pair, [way])
    source, reader = sources[way.source], readers[name]
    try:
        assert isinstance(source, Engine), source
        assert isinstance(reader, Engine), reader
        try:
            row = await measure(case, name, source, reader, repeats=2, warm_up=0)
        except KvferryError as error:
            if error.code not in ("other_way", "way_unavailable") or not (why := await refusal(name, reader)):
                raise
            pytest.skip(f"this pair cannot be read so: {why}")
        assert row.nbytes == case.nbytes
        assert name in ("auto", row.path)
    finally:
        for engine in (reader, source):
            if isinstance(engine, Engine):
                await engine.close()
