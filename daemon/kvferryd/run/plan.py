"""From the words of the command line and the environment to the processes that `kvferry run` starts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import Malformed, Unavailable
from kvferryd.config import bad_config, resolve
from kvferryd.run.daemons import Daemon, placed
from kvferryd.run.engines import RANK, Engine, known, shown

SOCKET = f"engine-{RANK}.sock"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Plan:
    """engine: the command, and what is added to the environment of its process."""

    daemons: tuple[Daemon, ...]
    engine: tuple[str, ...]
    environment: Mapping[str, str]
    engine_stop_s: float
    """How long the engine may take to stop before it is killed."""


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first `--`, and the engine's command behind it. Raises KvferryError (`no_engine`)."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = list(arguments[:at]), list(arguments[at + 1 :])
    if not command:
        words = " ".join(arguments)
        example = (
            f"kvferry run -- {words}" if words and not words.startswith("-") else "kvferry run -- vllm serve MODEL"
        )
        raise Malformed("no_engine", "no command stands behind --", field="command", value=repr(words),
                        remedy=f"write the engine's own command there: {example}")  # fmt: skip
    return own, command


def plan(
    given: Mapping[str, object],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    folder: str,
    gpus: Callable[[], int],
    read: Callable[[str], str],
    engine_stop_s: float,
) -> Plan:
    """given: the daemons' settings as flags, raw, by name. folder: of this run, for sockets. gpus: how many this
    process sees, asked where it matters. read: the text of a file. Raises KvferryError."""
    engine = known(command, environment, read)
    if (seen := engine.environment.get(VISIBLE)) != environment.get(VISIBLE):
        what = "the engine alone is told which GPUs it sees, and its daemons would count others"
        raise Malformed("bad_engine", what, field=VISIBLE, value=seen, remedy="set it before `kvferry run`, for all")
    base, origins = resolve(given, environment)
    ranks = engine.ranks
    told = {name: getattr(base, name) for name in ("engine_socket", "device") if origins[name] != "default"}
    socket = _socket(engine, str(told.get("engine_socket", "")), folder, ranks)
    if base.roster is not None and ranks > 1:
        raise bad_config("roster", base.roster, "the ranks' roster is rank 0's daemon, which kvferry run knows",
                         "leave roster out")  # fmt: skip
    roster = base.advertise if ranks > 1 else ""
    daemons = tuple(
        placed(rank, given, environment, device=device, socket=socket.replace(RANK, str(rank)), roster=roster)
        for rank, device in enumerate(_devices(engine, told.get("device"), gpus))
    )
    connected = engine.connected(socket, folder)
    return Plan(daemons, connected.words, connected.environment, engine_stop_s)


def _socket(engine: Engine, setting: str, folder: str, ranks: int) -> str:
    """The path at which daemons listen for the engine, with RANK in it: as either was told, else by rule."""
    told = engine.socket
    if told and setting and told != setting:
        what = f"the engine looks for its daemons at {told}, and they are told to listen elsewhere"
        raise bad_config("engine_socket", setting, what, "give one of the two, or the same to both")
    socket = told or setting or f"{folder}/{SOCKET}"
    if ranks > 1 and RANK not in socket:
        what = f"each of {ranks} ranks has a daemon, and a daemon its own socket"
        raise bad_config("engine_socket", socket, what, f"put {RANK} into the name: /run/kvferry/engine-{RANK}.sock")
    return socket


def _devices(engine: Engine, told: object, gpus: Callable[[], int]) -> Iterator[str]:
    """The device of each rank, in the numbers that engine and daemons have in common: both see what this process
    sees."""
    if told == "cpu" or engine.on_cpu or (told is None and not gpus()):
        yield from ["cpu"] * engine.ranks
        return
    numbers = [engine.gpu(rank) for rank in range(engine.ranks)]
    if told not in (None, f"cuda:{numbers[0]}"):
        what = f"the engine's first rank computes on cuda:{numbers[0]}, as it counts the GPUs that it sees"
        remedy = "leave device out, and let both see other GPUs: CUDA_VISIBLE_DEVICES=4,5 kvferry run ..."
        raise bad_config("device", told, what, remedy)
    if max(numbers) >= (seen := gpus()):
        raise Unavailable(
            "too_few_gpus", f"the engine's {engine.ranks} ranks need cuda:{max(numbers)}", field="visible GPUs",
            value=seen, remedy="let it see more (CUDA_VISIBLE_DEVICES, the container's devices), ask for fewer ranks,"
            " or --device cpu for an engine that computes on the CPU",
        )  # fmt: skip
    yield from (f"cuda:{number}" for number in numbers)


def described(plan: Plan) -> Iterator[str]:
    """Lines for `--check`."""
    yield from (daemon.described for daemon in plan.daemons)
    for name, value in plan.environment.items():
        yield f"engine: {name}={shlex.quote(value)}"
    yield f"engine: {shown(plan.engine)}"
