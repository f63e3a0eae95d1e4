"""Order to done on all ranks of two engines of so many ranks, a daemon for each: 128 tokens from warm peers.

    .venv/bin/python tests/integration/bench_ranks.py [RANKS [ROUNDS]]

Own: the engine names the source. Named: and its lease, too, as the plug-ins do. Router: a router orders at rank 0.
Prints the median in milliseconds, the tenth percentile, and milliseconds of CPU of all daemons of either side.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
import uuid
from collections.abc import Sequence

import psutil
import ranks
from fleet import TIMEOUT_S
from ranks import Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import DestinationBody, OrderBody
from kvferryd.demo.fleet import DaemonService, Fleet

TOKENS, WARM, KINDS = 128, 6, ("own", "named", "router")


def cpu_ms(daemons: Sequence[DaemonService]) -> float:
    return 1e3 * sum(sum(psutil.Process(daemon.process.pid).cpu_times()[:2]) for daemon in daemons)


async def once(kind: str, prefill: TestEngine, decode: TestEngine, router: RouterClient) -> tuple[float, float, float]:
    """Milliseconds: order to done, CPU of prefill's daemons, of decode's."""
    request_id = f"{kind}-{uuid.uuid4().hex}"
    leases = await prefill.publish(request_id, prefill.take(TOKENS), TOKENS)
    source, blocks = prefill.source(), decode.take(TOKENS)
    if kind == "named":
        source = source.model_copy(update={"epoch": prefill.epoch, "lease": leases[0].number})
    await asyncio.sleep(0.02)  # announcements have arrived
    used, began = (cpu_ms(prefill.daemons), cpu_ms(decode.daemons)), time.perf_counter()
    if kind == "router":
        body = OrderBody(request_id=request_id, source=source, destination=DestinationBody(engine_id=decode.engine_id))
        await asyncio.gather(decode.receive(request_id, blocks), router.order(body))
    else:
        await decode.receive(request_id, blocks, source=source)
    took_ms = 1e3 * (time.perf_counter() - began)
    await asyncio.gather(*(lease.ended() for lease in leases))
    await asyncio.sleep(0.03)  # the notes of its end are counted, too
    return took_ms, cpu_ms(prefill.daemons) - used[0], cpu_ms(decode.daemons) - used[1]


async def main(count: int, rounds: int) -> None:
    ranks.HEADS = count
    shape = Shape.tp(count, num_blocks=256)
    async with Fleet() as fleet:
        of_prefill, of_decode = fleet.daemons("prefill", count), fleet.daemons("decode", count)
        await fleet.ready(*of_prefill, *of_decode, timeout_s=TIMEOUT_S)
        prefill, decode = [await TestEngine.start(*each, shape) for each in (("p", of_prefill), ("d", of_decode))]
        async with RouterClient(of_decode[0].url) as router:
            for _ in range(WARM):
                for kind in KINDS:
                    await once(kind, prefill, decode, router)
            gc.disable()
            rows = {kind: list[tuple[float, float, float]]() for kind in KINDS}
            for _ in range(rounds):
                for kind in KINDS:
                    rows[kind].append(await once(kind, prefill, decode, router))
        for kind, measured in rows.items():
            took, source, destination = zip(*measured, strict=True)
            tenth = sorted(took)[len(took) // 10]
            print(
                f"{kind:8} {statistics.median(took):7.2f} ms  {tenth:7.2f} ms  "
                f"CPU {statistics.mean(source):6.1f} {statistics.mean(destination):6.1f} ms"
            )
        await decode.close()
        await prefill.close()


if __name__ == "__main__":
    said = [int(word) for word in sys.argv[1:]]
    asyncio.run(main(*(said + [8, 60][len(said) :])))
