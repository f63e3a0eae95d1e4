"""`kvferry run`: the daemons, then the engine; on a signal the drain, the engine, the daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from kvferryd.run.children import FAILED, Children
from kvferryd.run.plan import Plan

RUN, ENGINE = "run", "engine"


async def _launched(plan: Plan, folder: Path, environment: Mapping[str, str]) -> int:
    names = [*(daemon.name for daemon in plan.daemons), ENGINE]
    as_json = plan.daemons[0].config.log_format == "json"
    async with Children(RUN, names, folder, environment, as_json=as_json) as children:
        if not await children.serve(plan.daemons):
            return 128 + children.told.result() if children.told.done() and not children.lost else FAILED
        children.say("all daemons serve: the engine starts")
        engine = children.start(ENGINE, plan.engine, {"PYTHONUNBUFFERED": "1", **environment, **plan.environment})
        await children.first(None, children.told, *children.endings)
        if lost := children.lost:
            await children.stop(plan.engine_stop_s, engine)
            return children.failed(f"the keeper of {lost[0].name} {lost[0].how}: all else ends, too")
        if not engine.ended.done():
            await children.drain()
        await children.stop(plan.engine_stop_s, engine)
        if not engine.ended.done():
            return FAILED
        children.say(f"the engine {engine.how}")
        status = engine.ended.result()
        return status if status >= 0 else 128 - status


def launched(plan: Plan, folder: Path, environment: Mapping[str, str]) -> int:
    """Run it until the engine has ended, or a signal, or the death of a keeper, has ended it; returns the status."""
    return asyncio.run(_launched(plan, folder, environment))
