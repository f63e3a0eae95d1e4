"""`kvferry run`: the daemons, then the engine; on a signal the drain, the engine, the daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import Unavailable
from kvferryd.run.children import FAILED, Child, Children
from kvferryd.run.plan import Plan

START_S = 300.0
"""The longest that daemons may take until all serve: torch and Triton from a cold disk take a minute, several more."""
RUN, ENGINE = "run", "engine"


async def _launched(plan: Plan, folder: Path, environment: Mapping[str, str]) -> int:
    names = [*(daemon.name for daemon in plan.daemons), ENGINE]
    as_json = plan.daemons[0].config.log_format == "json"
    async with Children(RUN, names, folder, environment, as_json=as_json) as children:
        for daemon in plan.daemons:
            children.keep(daemon)
        serving = asyncio.gather(*(each.serving for each in children.kept))
        await children.first(START_S, serving, children.told, *children.endings)
        if lost := _lost(children):
            return _failed(children, f"{lost.name} {lost.how} before it served: its lines say why")
        if children.told.done():
            return 128 + children.told.result()
        if not serving.done():
            return _failed(children, f"not all daemons serve after {START_S:g} s: their lines say what they wait for")
        children.say("all daemons serve: the engine starts")
        engine = children.start(ENGINE, plan.engine, {"PYTHONUNBUFFERED": "1", **environment, **plan.environment})
        await children.first(None, children.told, *children.endings)
        if lost := _lost(children):
            await children.stop(plan.engine_stop_s, engine)
            return _failed(children, f"the keeper of {lost.name} {lost.how}: all else ends, too")
        if not engine.ended.done():
            await children.drain()
        await children.stop(plan.engine_stop_s, engine)
        if not engine.ended.done():
            return FAILED
        children.say(f"the engine {engine.how}")
        status = engine.ended.result()
        return status if status >= 0 else 128 - status


def _lost(children: Children) -> Child | None:
    """A keeper that has ended, which none does by itself."""
    return next((keeper for keeper in children.kept if keeper.ended.done()), None)


def _failed(children: Children, why: str) -> int:
    children.say(str(Unavailable("daemon_ended", why)), "error")
    return FAILED


def launched(plan: Plan, folder: Path, environment: Mapping[str, str]) -> int:
    """Run it until the engine has ended, or a signal, or the death of a keeper, has ended it; returns the status."""
    return asyncio.run(_launched(plan, folder, environment))
