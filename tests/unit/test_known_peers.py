"""The peers that the settings name, where they do not answer."""

from __future__ import annotations

import time

import pytest
from test_channels_of_ranks import first_of_two

from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.known import AGAIN_S, KnownPeers
from kvferryd.peers.peers import Peers

pytestmark = pytest.mark.anyio
NOBODY = "127.0.0.1:1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_peer_that_has_not_answered_a_thousand_times_is_tried_no_more_often() -> None:
    config = Config(known_peers=(NOBODY,))
    engine, peers = first_of_two(NOBODY), Peers(config, Metrics())
    known = KnownPeers(config, peers, lambda: [engine])
    known._failed[engine, NOBODY] = 1024, 0.0, "peer_unreachable"
    before = time.monotonic()
    await known._meet(engine, NOBODY)
    failures, again_at, _ = known._failed[engine, NOBODY]
    assert failures == 1025 and again_at >= before + AGAIN_S
    await peers.close()
