"""Blows to a request under way, by name. A blow lasts until `mending` ends, unless it is over at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeAlias

from fleet import TIMEOUT_S, ended
from remote import Remote, started
from scene import Request, Scene

from kvferry.errors import KvferryError
from kvferry.schemas import OrderBody
from kvferryd.demo.fleet import DaemonService
from stopping import stopped

OTHERWISE = 1 << 20
"""Added to a request's seed: KV of another request."""
AGAIN = 4


def _victim(scene: Scene, victim: str) -> DaemonService | Remote:
    """Its last rank: for example `source daemon`."""
    side, kind = victim.split()
    return (scene.side(side).daemons if kind == "daemon" else scene.side(side).engines)[-1]


async def kill(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    struck = _victim(scene, victim)
    if isinstance(struck, DaemonService):
        scene.killed.add(struck.process.pid)
        await ended(struck, signal.SIGKILL)
    else:
        struck.process.kill()
        await struck.process.wait()


async def stop(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    struck = _victim(scene, victim)
    mending.enter_context(stopped(struck.process.pid, group=isinstance(struck, DaemonService)))


async def vanish(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """The host of the source: nothing comes back, not even a reset."""
    assert scene.far is not None
    scene.far.vanish()
    mending.callback(scene.far.come_back)


async def deafen(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """Half-open: the source's host hears nothing, and is heard."""
    assert scene.far is not None
    scene.far.deafen()
    mending.callback(scene.far.come_back)


async def unplug(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """The line between both hosts is down, and both know it."""
    assert scene.far is not None
    mending.enter_context(scene.far.unplugged())


async def revoke(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """The lease, by a router, at every rank of the source."""
    for router in scene.source.routers:
        with contextlib.suppress(KvferryError):  # nothing is published yet
            await router.revoke_lease(request.request_id)


async def withdraw(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """The prefill is preempted: it takes its blocks back and writes other KV into them at once."""

    async def taken_back(rank: Remote) -> None:
        with contextlib.suppress(KvferryError):
            await rank.withdraw(request.request_id, request.blocks, request.tokens, request.seed + OTHERWISE)

    await asyncio.gather(*map(taken_back, scene.source.engines))


async def abort(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    await scene.reader.routers[0].abort_request(request.request_id)


async def cancel(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """The receiving engine cancels."""
    await asyncio.gather(*(rank.cancel(request.request_id) for rank in request.readers))


async def retry(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """Aborted, and tried again under its id, with other KV, into the same blocks as soon as they are safe."""
    await abort(scene, request, victim, mending)
    await asyncio.gather(*request.receives, return_exceptions=True)
    await asyncio.gather(*(rank.quiesced(request.request_id) for rank in request.readers))
    request.seed += OTHERWISE
    await scene.publish(request)
    scene.receive(request)


async def duplicate(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """The order comes again and again under its id, which may be after the end, and at last another one."""
    source = scene.source.engines[0].source()
    order = OrderBody(request_id=request.request_id, source=source, deadline_ms=round(1000 * request.deadline_s))
    again = order.model_copy(update={"order_id": f"{request.request_id}-again"})
    other = order.model_copy(update={"deadline_ms": 1000})
    for each in (*[again] * AGAIN, other):
        with contextlib.suppress(KvferryError):
            await scene.reader.routers[0].order(each)


async def twin(scene: Scene, request: Request, victim: str, mending: AsyncExitStack) -> None:
    """Two engines with one id at one daemon: the first one lives, and the second is refused, in any epoch."""
    (own,) = scene.source.engines

    async def refused(epoch: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *started(own.daemon, own.engine_id, scene.source.shape, epoch), stdin=-1, stdout=-1, stderr=-1
        )
        said = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert process.returncode, said

    await asyncio.gather(refused(own.epoch), refused(f"{own.epoch}-twin"))


Blow: TypeAlias = Callable[[Scene, Request, str, AsyncExitStack], Awaitable[None]]
SUDDEN: dict[str, Blow] = {
    "kill": kill, "stop": stop, "vanish": vanish, "deafen": deafen, "unplug": unplug,
}  # fmt: skip
"""They strike while the source stands still."""
ASKED: dict[str, Blow] = {
    "revoke": revoke, "withdraw": withdraw, "abort": abort, "cancel": cancel, "retry": retry, "duplicate": duplicate,
    "twin": twin,
}  # fmt: skip
"""They are asked of processes that run."""
