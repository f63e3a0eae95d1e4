"""Ends of many steps: each step is tried, even if earlier ones failed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferryd.observe import logs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """take: has failed where it raises, or returns (or is awaited to) False. needs: names of steps before this one; if
    one of them has failed, this one must not be taken."""

    name: str
    take: Callable[[], object]
    needs: frozenset[str] = frozenset()


async def ended(steps: Iterable[Step], **about: object) -> frozenset[str]:
    """Take the steps in their order. Names of steps that failed, or were not taken. Each has a line in the log. about:
    what the lines are about."""
    failed = set[str]()
    for step in steps:
        if lacks := step.needs & failed:
            log.error("a step of an end is not taken", step=step.name, as_failed=sorted(lacks), **about)
        elif await _taken(step, about):
            continue
        failed.add(step.name)
    return frozenset(failed)


async def _taken(step: Step, about: dict[str, object]) -> bool:
    task = asyncio.current_task()
    try:
        result = step.take()
        if inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        log.error("a step of an end failed", step=step.name, exc_info=error, **about)  # it awaited what was cancelled
        return False
    except Exception:
        log.exception("a step of an end failed", step=step.name, **about)
        return False
    if result is False:
        log.error("a step of an end failed", step=step.name, **about)
        return False
    return True


class tried(contextlib.AbstractContextManager[None, bool]):  # noqa: N801  as those of contextlib
    """The same for a step that is taken inside: its failure is logged, and goes no further."""

    def __init__(self, step: str, **about: object) -> None:
        self._step, self._about = step, about

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("a step of an end failed", step=self._step, exc_info=error, **self._about)
        return True
