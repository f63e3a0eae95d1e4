"""The daemon's settings, and the only reader of the environment.

One table, the fields of `Config`, drives the TOML file, the KVFERRY_* variables, the flags of `kvferry serve` and
the table in docs/operations.md. Flags win over the environment, the environment over the file. The kinds of value
are in `kvferryd.settings`.
"""

# ruff: noqa: RUF009 - `_option` is `dataclasses.field` with a word of help: it returns no shared value
from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from kvferry.errors import Malformed
from kvferryd import settings
from kvferryd.settings import Kind, LogFormat, LogLevel, Wrong

PREFIX = "KVFERRY_"
LOOPBACK = ("127.0.0.0/8", "::1", "localhost")

T = TypeVar("T")
ADDRESS, PLACE = settings.address(any_port=True), settings.address(any_port=False)
FILE, SOCKET = settings.readable_file(), settings.socket_path()
FLAG, PEERS, UCX = settings.flag(), settings.peers(), settings.ucx()
WAYS = ("auto", "direct", "staged", "mapped")
DEVICE, WAY = settings.device(), settings.one_of(*WAYS)


@dataclass(frozen=True, slots=True)
class Option:
    """What is said about a setting beside its default."""

    kind: Kind
    help: str


def _option(default: T, kind: Kind, help: str) -> T:
    about = {"option": Option(kind, help)}
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=default.copy, metadata=about))
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of a daemon. `load` builds it checked; built directly, nothing is checked.

    Names end in their unit: `_s` seconds, `_mb` MiB.
    """

    rest: str = _option("127.0.0.1:7410", ADDRESS, "where the REST API and the status page listen")
    peer: str = _option("127.0.0.1:7411", ADDRESS, "where other daemons reach this one")
    advertise: str = _option("", PLACE, "the address given to other daemons; default: that of peer")
    engine_socket: Path = _option(Path("/run/kvferry/engine.sock"), SOCKET, "Unix socket for engines, mode 0600")
    device: str = _option("cpu", DEVICE, "the GPU this daemon runs beside, or cpu for host memory")
    roster: str | None = _option(
        None, PLACE, "peer address of rank 0's daemon, which introduces the ranks to each other"
    )
    arena_mb: int = _option(
        512,
        settings.whole(0),
        "staging arena of an engine, MiB; on a GPU made unless way is direct or mapped, on host memory only where "
        "staging is forced; 0: none",
    )
    way: str = _option(
        "auto", WAY, "how to move runs; auto: mapped if possible, else staged for short runs, direct for long"
    )
    programs: int = _option(
        16,
        settings.whole(1, 1024),
        "SMs that a mapped copy may take on the GPU; a staging slot's takes twice as many, for 0.1 ms",
    )
    strict: bool = _option(False, FLAG, "register and export staging slots only: peers can read nothing else")
    allow_peers: tuple[str, ...] = _option(LOOPBACK, PEERS, "addresses that may be dialled and may dial in")
    token_file: Path | None = _option(None, FILE, "bearer tokens of the REST API, one a line; read again on change")
    tls_cert: Path | None = _option(None, FILE, "certificate (chain), PEM; read again on change")
    tls_key: Path | None = _option(None, FILE, "its private key, PEM")
    tls_ca: Path | None = _option(None, FILE, "authority that peers' certificates must be signed by, PEM")
    rest_tls: bool = _option(False, FLAG, "serve REST over mutual TLS with the tls_* files as well")
    log_format: LogFormat = _option(LogFormat.TEXT, settings.member(LogFormat), "text for people, json for machines")
    log_level: LogLevel = _option(LogLevel.INFO, settings.member(LogLevel), "the least serious line that is logged")
    lease_ttl_s: float = _option(30.0, settings.number(0.1, 86400), "life of a lease without a live reader")
    fence_timeout_s: float = _option(30.0, settings.number(0.1, 3600), "longest wait for the fence of a publish")
    deadline_s: float = _option(60.0, settings.number(0.1, 3600), "life of a transfer whose order names no deadline")
    max_transfers: int = _option(256, settings.whole(1), "unfinished transfers; more orders are answered 429")
    max_leases: int = _option(4096, settings.whole(1), "live leases; more are refused")
    history: int = _option(1000, settings.whole(0), "ended transfers that can still be looked up")
    drain_timeout_s: float = _option(300.0, settings.number(0, 86400), "longest wait for leases to be read at exit")
    require_rdma: bool = _option(False, FLAG, "without RDMA or NVLink, /readyz says no")
    nixl_threads: int = _option(0, settings.whole(0, 64), "extra NIXL worker threads; 0: none")
    ucx: Mapping[str, str] = _option({}, UCX, "extra UCX settings, without the prefix UCX_")
    connect_timeout_s: float = _option(5.0, settings.number(0.1, 600), "longest wait for a peer to answer")

    def __post_init__(self) -> None:
        if not self.advertise:
            object.__setattr__(self, "advertise", self.peer)

    @property
    def tls(self) -> bool:
        """Whether peers (and REST, with rest_tls) speak mutual TLS."""
        return self.tls_cert is not None

    def warnings(self) -> Iterator[str]:
        """What is allowed but should be known, one sentence each."""
        if not settings.is_loopback(self.rest) and self.token_file is None and not self.rest_tls:
            yield f"REST listens on {self.rest} and asks nobody for a token: set token_file or rest_tls"
        if not settings.is_loopback(self.peer) and not self.tls:
            yield f"peers speak to {self.peer} without TLS: set tls_cert, tls_key and tls_ca"


OPTIONS: Mapping[str, Option] = {field.name: field.metadata["option"] for field in dataclasses.fields(Config)}


@dataclass(frozen=True, slots=True)
class BadSetting:
    """One wrong setting. `origin`: `file FILE`, `environment KVFERRY_X` or `flag --x`."""

    field: str
    value: object
    origin: str
    wrong: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r} ({self.origin}) {self.wrong} -> {self.remedy}"


class ConfigError(Malformed):
    """`bad_config`: every wrong setting at once, in `settings`; field, value and remedy are those of a single one."""

    def __init__(self, wrong: list[BadSetting]) -> None:
        self.settings = tuple(wrong)
        if len(wrong) == 1:
            only = wrong[0]
            super().__init__(
                "bad_config", f"{only.field} from {only.origin} {only.wrong}",
                field=only.field, value=repr(only.value), remedy=only.remedy,
            )  # fmt: skip
        else:
            lines = "".join(f"\n  {setting}" for setting in wrong)
            super().__init__("bad_config", f"{len(wrong)} settings are wrong:{lines}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and, by field, where each value came from (`default` where nobody said)."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reach:
    """How to ask a daemon over REST: where, and with what to be let in."""

    url: str
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None


def load(flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration from file, environment and flags. Raises ConfigError (`bad_config`) listing every fault.

    flags: raw values by field name, and `config` for the file. environment: the process's where absent.
    """
    return resolve(flags, environment).config


def resolve(flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Loaded:
    """`load`, with the origin of every value."""
    wrong: list[BadSetting] = []
    read = _read(OPTIONS.keys(), flags, environment, wrong)
    origins = {name: origin for name, (_, origin) in read.items()}
    config = _config(read)
    wrong += [*_tls_together(config, origins), *_together(config, origins)]
    if wrong:
        raise ConfigError(wrong)
    return Loaded(config, {name: origins.get(name, "default") for name in OPTIONS})


def _read(
    names: Set[str], flags: Mapping[str, object] | None, environment: Mapping[str, str] | None, wrong: list[BadSetting]
) -> dict[str, tuple[object, str]]:
    """(value, origin) of those settings that were given. Faults are added to `wrong`."""
    read: dict[str, tuple[object, str]] = {}
    for name, raw, origin in _raw_settings(flags or {}, os.environ if environment is None else environment, wrong):
        try:
            if name in names:
                read[name] = OPTIONS[name].kind.read(raw), origin
        except Wrong as reason:
            wrong.append(BadSetting(name, raw, origin, str(reason), f"write {OPTIONS[name].kind.form}"))
    return read


def _config(read: Mapping[str, tuple[object, str]]) -> Config:
    """What was read, over the defaults."""
    return Config(**{name: value for name, (value, _) in read.items()})  # type: ignore[arg-type]  # kinds read types


def _raw_settings(
    flags: Mapping[str, object], environment: Mapping[str, str], wrong: list[BadSetting]
) -> Iterator[tuple[str, object, str]]:
    """(name, raw value, origin), the winner only. Faults of the file itself are added to `wrong`."""
    chosen = flags.get("config") or environment.get(f"{PREFIX}CONFIG")
    origin = "flag --config" if flags.get("config") else f"environment {PREFIX}CONFIG"
    listed = _read_file(Path(str(chosen)), origin, wrong) if chosen else {}
    for name in OPTIONS:
        variable = f"{PREFIX}{name.upper()}"
        if flags.get(name) is not None:
            yield name, flags[name], f"flag --{name.replace('_', '-')}"
        elif environment.get(variable):  # an empty variable is how Kubernetes and shells say unset
            yield name, environment[variable], f"environment {variable}"
        elif name in listed:
            yield name, listed[name], f"file {chosen}"


def _read_file(path: Path, origin: str, wrong: list[BadSetting]) -> dict[str, object]:
    try:
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        wrong.append(BadSetting("config", str(path), origin, f"cannot be read: {error.strerror}", "name a TOML file"))
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        remedy = 'write TOML, for example arena_mb = 512 or way = "auto"'
        wrong.append(BadSetting("config", str(path), origin, f"is not TOML: {error}", remedy))
        return {}
    for name in listed.keys() - OPTIONS.keys():
        remedy = (
            f"did you mean {nearest(name)}?" if nearest(name) else "remove it; docs/operations.md lists all settings"
        )
        wrong.append(BadSetting(name, listed[name], f"file {path}", "is not a setting", remedy))
    return listed


def nearest(name: str) -> str:
    """The setting that `name` most resembles, or an empty string."""
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), OPTIONS, n=1)), "")


def _tls_together(config: Config, origins: Mapping[str, str]) -> Iterator[BadSetting]:
    for name in ("tls_cert", "tls_key", "tls_ca"):
        if getattr(config, name) is None and any((config.tls_cert, config.tls_key, config.tls_ca)):
            yield BadSetting(
                name, None, "default", "is missing beside the other tls_* settings", "set all three or none"
            )
    if config.rest_tls and not config.tls:
        origin = origins.get("rest_tls", "default")
        yield BadSetting("rest_tls", True, origin, "has no certificate", "set tls_cert, tls_key and tls_ca")


def _together(config: Config, origins: Mapping[str, str]) -> Iterator[BadSetting]:
    """Rules between settings."""
    if settings.is_wildcard(config.peer) and "advertise" not in origins:
        yield BadSetting(
            "advertise", config.advertise, "default",
            f"is no address to dial, as peer = {config.peer} is every interface",
            "set advertise to the HOST:PORT at which other daemons reach this one",
        )  # fmt: skip


def misspelt(environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """(variable, the one probably meant) for KVFERRY_* variables that nothing reads.

    They are no error: a Kubernetes service named kvferry puts KVFERRY_SERVICE_HOST and the like into every pod.
    """
    for variable in sorted(os.environ if environment is None else environment):
        name = variable.removeprefix(PREFIX)
        service = re.search(r"(^|_)(SERVICE_(HOST|PORT)|PORT)(_|$)", name)
        if variable.startswith(PREFIX) and name.lower() not in {*OPTIONS, "config"} and not service and nearest(name):
            yield variable, f"{PREFIX}{nearest(name).upper()}"


def reach(flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Reach:
    """How a command reaches the daemon of this machine: by the settings that the daemon itself was given.

    Only those are read, so that a fault in another setting keeps nobody from asking. Raises ConfigError.
    """
    wrong: list[BadSetting] = []
    read = _read({"rest", "rest_tls", "token_file", "tls_cert", "tls_key", "tls_ca"}, flags, environment, wrong)
    config = _config(read)
    wrong += _tls_together(config, {name: origin for name, (_, origin) in read.items()})
    if wrong:
        raise ConfigError(wrong)
    host, port = settings.split_address(config.rest)
    if settings.is_wildcard(config.rest):
        host = "127.0.0.1"
    scheme = "https" if config.rest_tls else "http"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    return Reach(url, config.token_file, config.tls_cert, config.tls_key, config.tls_ca)


def markdown_table() -> str:
    """The table of docs/operations.md."""
    defaults = Config()
    rows = ["| setting | form | default | what |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        default = "that of peer" if name == "advertise" else option.kind.write(getattr(defaults, name)) or "none"
        rows.append(f"| `{name}` | {option.kind.form.replace('|', chr(92) + '|')} | {default} | {option.help} |")
    return "\n".join(rows)
