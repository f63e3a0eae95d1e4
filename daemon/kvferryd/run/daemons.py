"""A daemon of several that one command starts: its settings by rule, from those of the first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferryd.config import Config, bad_config, resolve, written
from kvferryd.config.types import split_address

APART = 10
"""Between the ports of two daemons: 7410 and 7411, then 7420 and 7421."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """To be started under a keeper. flags: of `kvferry keep`, which resolve to the config."""

    name: str
    config: Config
    flags: tuple[str, ...]

    @property
    def described(self) -> str:
        config = self.config
        return (f"{self.name}: {config.device}, REST at {config.url}, peers at {written(config.advertise)}, "
                f"engine socket {config.engine_socket}")  # fmt: skip


def placed(
    number: int, given: Mapping[str, object], environment: Mapping[str, str], *, device: str, socket: str, roster: str
) -> Daemon:
    """given: the first one's settings as flags, raw, by name. roster: empty where each engine has one rank. Raises
    KvferryError."""
    base, origins = resolve(given, environment)
    names = ("rest", "peer") if origins["advertise"] == "default" else ("rest", "peer", "advertise")
    decided: dict[str, object] = {name: moved(name, getattr(base, name), number) for name in names}
    decided |= {"engine_socket": socket, "device": device, **({"roster": roster} if roster else {})}
    settings = {**given, **decided}
    return Daemon(f"daemon-{number}", resolve(settings, environment)[0], (*_flags(settings),))


def moved(name: str, address: str, number: int) -> str:
    """The address of a daemon, of that of the first."""
    host, port = split_address(address)
    if not 0 < port <= 65535 - number * APART:
        what = f"daemon {number} has port {port} + {number * APART}, which is none"
        raise bad_config(name, address, what, f"name a port from 1 to {65535 - number * APART}")
    return f"[{host}]:{port + number * APART}" if ":" in host else f"{host}:{port + number * APART}"


def _flags(settings: Mapping[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}={each}" for each in value)
        elif value is not None:
            yield f"--{flag}={value}"
