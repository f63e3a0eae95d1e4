"""`kvferry demo`: two engines of different shape, their daemons and a proxy, all real; every token compared."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from kvferry.asgi import unless
from kvferry.errors import KvferryError
from kvferryd.demo.fleet import Fleet, Service, ServiceError
from kvferryd.demo.report import Narrator
from kvferryd.demo.story import Cast, start, tell
from kvferryd.transport import nixl

DESCRIPTION = """\
Starts, on this machine and without a GPU: a prefill engine (TP=2, layout NHD, blocks of 16 tokens), a decode engine
(TP=3, layout HND, blocks of 24), a daemon beside each of the five ranks, a proxy that orders the transfers over REST,
and a third engine that works alone. Sends the same prompts through the proxy and to the engine alone, and compares
every token. Exits with 0 only if all are equal and every transfer is done.
"""
T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFERENCE = ("torch", "safetensors", "tokenizers", "fastapi", "uvicorn")
"""Packages of the extra `reference`: the demo's engines and proxy import them, the demo itself does not."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0 when all is well, 1 when not, 128 + N when ended by signal N."""
    parser = argparse.ArgumentParser(
        prog="kvferry demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C, and say where")
    parser.add_argument(
        "--deadline", type=_seconds, default=120.0, metavar="S", help="for the whole demo (default: 120 s)"
    )
    flags = parser.parse_args(argv)
    for package in REFERENCE:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    nixl.load()  # says what to install, as a daemon does
    return asyncio.run(_run(keep=flags.keep, deadline_s=flags.deadline))


async def _run(*, keep: bool, deadline_s: float) -> int:
    narrator = Narrator(Console())
    signals: list[int] = []
    act = asyncio.create_task(_act(narrator, keep=keep, deadline_s=deadline_s))

    def end(number: int) -> None:
        signals.append(number)
        act.cancel()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, end, number)
    await asyncio.wait({act})
    if not act.cancelled():
        return act.result()
    narrator.say("everything is stopped")
    return 0 if keep and signals == [signal.SIGINT] else 128 + signals[0]


async def _act(narrator: Narrator, *, keep: bool, deadline_s: float) -> int:
    fleet = Fleet()
    try:
        async with asyncio.timeout(deadline_s):
            cast = await start(fleet, narrator)
            faults = await _while_all_live(fleet, tell(cast, narrator))
        if faults:
            _failed(fleet, narrator, faults, [])
        elif keep:
            await _kept(fleet, narrator, cast)
        return 1 if faults else 0
    except TimeoutError:
        _failed(fleet, narrator, [f"the demo was not over after {deadline_s:g} s"], fleet.services)
    except ServiceError as error:
        _failed(fleet, narrator, [error.message], [error.service])
    except KvferryError as error:
        _failed(fleet, narrator, [str(error)], fleet.ended() or fleet.services)
    finally:
        fleet.close()
    return 1


async def _while_all_live(fleet: Fleet, work: Coroutine[object, object, T]) -> T:
    """The result of `work`. Raises ServiceError when a process ends before it is there."""
    return await unless(fleet.watch(), work)


def _failed(fleet: Fleet, narrator: Narrator, faults: Sequence[str], services: Sequence[Service]) -> None:
    """Say what went wrong, and what the processes in question said last."""
    fleet.keep_logs = True
    for service in services:
        narrator.console.print(f"\n[bold]{service.name}[/bold], {service.log}:", soft_wrap=True)
        narrator.console.print(escape(service.tail()), highlight=False, soft_wrap=True)
    narrator.console.print()
    for fault in faults:
        narrator.say(f"[bold red]failed:[/bold red] {escape(fault)}")
    narrator.say(f"logs are in {fleet.directory}")
    sys.stdout.flush()


async def _kept(fleet: Fleet, narrator: Narrator, cast: Cast) -> None:
    """Until Ctrl-C, or until a process ends."""
    places = {"proxy": f"{cast.proxy.url}/v1/completions"}
    places |= {f"status page {daemon.name}": f"{daemon.url}/" for daemon in cast.daemons}
    places |= {engine.name: f"{engine.url}/v1/completions" for engine in (cast.prefill, cast.decode, cast.alone)}
    places |= {"logs": str(fleet.directory)}
    narrator.console.print()
    for name, place in places.items():
        narrator.console.print(f"{name:<22}{place}", soft_wrap=True)
    narrator.console.print(
        f"\ntry: curl {cast.proxy.url}/v1/completions -d '{{\"prompt\": \"Ferry me\", \"max_tokens\": 8}}'\n"
        "Ctrl-C stops everything", soft_wrap=True,
    )  # fmt: skip
    await fleet.watch()


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError("above 0 and at most 3600 seconds")
    return value
