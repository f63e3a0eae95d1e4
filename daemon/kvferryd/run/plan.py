"""From the words of the command line and the environment to the processes that `kvferry run` starts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import Malformed, Unavailable
from kvferryd.config import Config, bad_config, resolve, written
from kvferryd.config.types import split_address
from kvferryd.run.engines import RANK, Engine, known, shown

APART = 10
"""Between the ports of two ranks: 7410 and 7411, then 7420 and 7421."""
SOCKET = f"engine-{RANK}.sock"
VISIBLE = "CUDA_VISIBLE_DEVICES"
BY_RULE = ("rest", "peer", "advertise", "engine_socket", "device", "roster")
"""Settings that differ between ranks, or follow from them."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon of a rank, under its keeper. flags: of `kvferry keep`, which resolve to the config."""

    rank: int
    config: Config
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """engine: the command, and what is added to the environment of its process."""

    daemons: tuple[Daemon, ...]
    engine: tuple[str, ...]
    environment: Mapping[str, str]
    engine_stop_s: float
    """How long the engine may take to stop before it is killed."""

    @property
    def drain_s(self) -> float:
        return self.daemons[0].config.drain_timeout_s


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
    told = {name: getattr(base, name) for name in BY_RULE if origins[name] != "default"}
    socket = _socket(engine, str(told.get("engine_socket", "")), folder, ranks)
    devices = [*_devices(engine, told.get("device"), gpus)]
    if base.roster is not None and ranks > 1:
        raise bad_config("roster", base.roster, "the ranks' roster is rank 0's daemon, which kvferry run knows",
                         "leave roster out")  # fmt: skip
    daemons = []
    for rank in range(ranks):
        decided = {name: _moved(name, getattr(base, name), rank) for name in ("rest", "peer", "advertise")
                   if name != "advertise" or name in told}  # fmt: skip
        decided |= {"engine_socket": socket.replace(RANK, str(rank)), "device": devices[rank]}
        decided |= {"roster": base.advertise} if ranks > 1 else {}
        config, _ = resolve({**given, **decided}, environment)
        daemons.append(Daemon(rank, config, (*_flags({**given, **decided}),)))
    connected = engine.connected(socket, folder)
    return Plan(tuple(daemons), connected.words, connected.environment, engine_stop_s)


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
    """Of each rank, in the numbers that engine and daemons have in common: both see what this process sees."""
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


def _moved(name: str, address: str, rank: int) -> str:
    """The address of a rank, of that of rank 0."""
    host, port = split_address(address)
    if not 0 < port <= 65535 - rank * APART:
        what = f"rank {rank} has port {port} + {rank * APART}, which is none"
        raise bad_config(name, address, what, f"name a port from 1 to {65535 - rank * APART}")
    return f"[{host}]:{port + rank * APART}" if ":" in host else f"{host}:{port + rank * APART}"


def _flags(settings: Mapping[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}={each}" for each in value)
        elif value is not None:
            yield f"--{flag}={value}"


def described(plan: Plan) -> Iterator[str]:
    """Lines for `--check`."""
    for daemon in plan.daemons:
        config = daemon.config
        yield (f"daemon-{daemon.rank}: {config.device}, REST at {config.url}, peers at {written(config.advertise)}, "
               f"engine socket {config.engine_socket}")  # fmt: skip
    for name, value in plan.environment.items():
        yield f"engine: {name}={value}"
    yield f"engine: {shown(plan.engine)}"
