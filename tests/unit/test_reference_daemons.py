"""The end of a load on several ranks, of which one fails and the others hear of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.handoff import Origin
from kvferry.reference.daemons import Daemons, LoadFailed
from kvferry.schemas import SourceBody

pytestmark = pytest.mark.anyio
HEARD = {
    "refused as its attempt is over": Conflict("aborted", "attempt 1 of request r has ended on another rank"),
    "ended with it": PeerFailed("rank_failed", "rank 1 of the same engine failed"),
}


@pytest.mark.parametrize("heard", HEARD.values(), ids=HEARD.keys())
async def test_a_load_fails_with_the_reason_of_the_rank_that_failed_by_itself(heard: KvferryError) -> None:
    """Also where another rank hears of it first."""
    told = asyncio.Event()

    class First:
        async def receive(self, *_: object, **__: object) -> None:
            told.set()
            raise heard

    class Second:
        async def receive(self, *_: object, **__: object) -> None:
            await told.wait()
            await asyncio.sleep(0)
            raise Conflict("other_prompt", "it is that of another prompt")

    engine, ranks = SimpleNamespace(load_timeout_s=60.0), [First(), Second()]
    daemons = Daemons(engine, ranks, AsyncExitStack())  # type: ignore[arg-type]
    origin = Origin("r", 1, SourceBody(engine_id="p", address="127.0.0.1:1"))
    with pytest.raises(LoadFailed) as failed:
        await daemons.receive(origin, {}, (0, 1))
    assert failed.value.code == "other_prompt"
