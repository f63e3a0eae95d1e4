"""Much at once: a thousand requests that are given up at random moments, and a peer that is restarted fifty times."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, ended, until
from ranks import STATE_NBYTES, TOKEN_NBYTES
from scene import COUNT, DIRECT, RANKS, SMALL, Request, Scene, scened

from kvferry.errors import KvferryError
from kvferry.schemas import OrderBody

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(1800)]
REQUESTS, AT_ONCE = 1000, 12
SHUFFLED, SHUFFLED_AT_ONCE = 200, 8
SMALL_NBYTES = SMALL * TOKEN_NBYTES + STATE_NBYTES
RESTARTS, LOAD = 50, 4
LATEST_S = 0.06
"""A request is given up at a moment before that: some are done by then."""
DEADLINE_S = 30.0


async def given_up(scene: Scene, request: Request, how: str) -> None:
    match how:
        case "cancelled":
            await request.readers[0].cancel(request.request_id)
        case "aborted":
            await scene.reader.routers[0].abort_request(request.request_id)
        case "revoked":
            with contextlib.suppress(KvferryError):  # it has been read
                await scene.source.routers[0].revoke_lease(request.request_id)


async def test_a_thousand_requests_that_are_given_up_at_random_moments(
    daemons: Daemons, stack: AsyncExitStack, record_property: Callable[[str, object], None]
) -> None:
    scene = await stack.enter_async_context(scened(daemons, DIRECT))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, ends, left = random.Random(seed), Counter[str](), iter(range(REQUESTS))

    async def one_after_another(block: int) -> None:
        for number in left:
            request = scene.request(SMALL, DEADLINE_S, block)
            await scene.publish(request)
            scene.receive(request, ordered=number % 2 == 0)
            how = rng.choice(("cancelled", "aborted", "revoked"))
            async with asyncio.TaskGroup() as group:
                if number % 2:
                    body = OrderBody(request_id=request.request_id, source=scene.source.engines[0].source())
                    group.create_task(_whatever(scene.reader.routers[0].order(body)))
                await asyncio.sleep(rng.uniform(0, LATEST_S))
                await given_up(scene, request, how)
            await scene.ended(request)
            await scene.settled(request)
            ends[request.ends[0]] += 1

    async with asyncio.TaskGroup() as group:
        for worker in range(AT_ONCE):
            group.create_task(one_after_another(worker))
    assert ends.total() == REQUESTS
    await scene.serves()
    await scene.at_rest()
    said = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    record_property("seen", [f"{REQUESTS} requests given up at random moments", said, "", ""])


async def test_what_is_said_of_a_request_comes_twice_and_in_any_order(
    daemons: Daemons, stack: AsyncExitStack, record_property: Callable[[str, object], None]
) -> None:
    """Two ranks on either side: what four engines and a router say of one request, shuffled, every order twice."""
    scene = await stack.enter_async_context(scened(daemons, RANKS))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, left = random.Random(seed), iter(range(SHUFFLED))

    async def one_after_another(block: int) -> None:
        for number in left:
            request = scene.request(SMALL, DEADLINE_S, block)
            named, source = request.request_id, scene.source.engines[0].source()
            body = OrderBody(request_id=named, source=source, order_id=named)  # a late one is no other order
            publishes = [scene.publish_at(rank, request, lease=SHUFFLED + number) for rank in scene.source.engines]
            orders = [router.order(body) for router in scene.reader.routers * 2]
            said = [*publishes, *orders, *scene.receives(request, ordered=False)]
            rng.shuffle(said)
            tasks = []
            for each in said:
                tasks.append(asyncio.ensure_future(each))
                await asyncio.sleep(rng.uniform(0, LATEST_S / len(said)))
            moved = await asyncio.gather(*tasks)
            assert sum(each for each in moved if isinstance(each, int)) == SMALL_NBYTES
            for rank in scene.reader.engines:
                assert await rank.differs(request.blocks, request.tokens, request.seed) == "", request

    async with asyncio.TaskGroup() as group:
        for worker in range(SHUFFLED_AT_ONCE):
            group.create_task(one_after_another(worker))
    await scene.serves()
    await scene.at_rest()
    record_property("seen", [f"{SHUFFLED} requests, what is said of them shuffled and doubled", "done", "", ""])


async def _whatever(calling: object) -> None:
    """It may come too late."""
    with contextlib.suppress(KvferryError):
        await calling  # type: ignore[misc]


async def test_a_source_that_is_restarted_fifty_times_under_load(
    daemons: Daemons, stack: AsyncExitStack, record_property: Callable[[str, object], None]
) -> None:
    """Daemon and engine, killed and stopped by turns; its readers read on."""
    scene = await stack.enter_async_context(scened(daemons, DIRECT))
    ends, over = Counter[str](), asyncio.Event()

    async def reading(first: int) -> None:
        size = COUNT // LOAD
        while not over.is_set():
            request = scene.request(size * SMALL, DEADLINE_S, first * size)
            try:
                await scene.publish(request)
                scene.receive(request)
            except (KvferryError, ConnectionError):  # there is nobody to publish it just now
                await asyncio.sleep(0.05)
                continue
            await scene.ended(request)
            await scene.settled(request)
            ends[request.ends[0]] += 1

    readers = [asyncio.create_task(reading(number)) for number in range(LOAD)]
    try:
        for restart in range(RESTARTS):
            before = ends["done"]

            async def goes_on(before: int = before) -> bool:
                assert not any(task.done() for task in readers), [task for task in readers if task.done()]
                return ends["done"] >= before + 2 * LOAD  # they are at different places by then

            await until(goes_on, f"something is done after {restart} restarts")
            (daemon,) = scene.source.daemons
            scene.killed.add(daemon.process.pid)
            await ended(daemon, signal.SIGKILL if restart % 2 else signal.SIGTERM)
            await scene.revived()
    finally:
        over.set()
        await asyncio.gather(*readers)
    await scene.serves()
    await scene.at_rest()
    said = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    record_property("seen", [f"{RESTARTS} restarts of a source under load", said, "", ""])
