"""The daemon's settings, and the only reader of the environment.

A model, `Config`, drives the TOML file, the KVFERRY_* variables, the flags of `kvferry serve` and the table in
docs/reference. Flags win over the environment, the environment over the file. The types are in `kvferryd.config.types`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from kvferry.errors import Malformed
from kvferry.schemas import Way
from kvferryd.config.types import (
    ADDRESS,
    Addresses,
    Device,
    Dial,
    File,
    Flag,
    Folder,
    Form,
    Listen,
    NodeDir,
    Peers,
    Seconds,
    SecretFile,
    Socket,
    Ucx,
    Whole,
    is_loopback,
    is_wildcard,
    split_address,
)

PREFIX = "KVFERRY_"
WAYS: tuple[str, ...] = get_args(Way)


def _about(default: Any, help: str, ge: float | None = None, le: float | None = None) -> Any:
    """A setting's default, what it is for, and its limits."""
    return Field(default, description=help, ge=ge, le=le)


class Config(BaseModel):
    """Every setting of a daemon, each checked; `resolve` checks them together. Units: `_s` seconds, `_mb` MiB."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    rest: Listen = _about("127.0.0.1:7410", "where the REST API and the status page listen")
    peer: Listen = _about("127.0.0.1:7411", "where other daemons reach this one")
    advertise: Dial = _about("", "the address given to other daemons, in place of that of peer")
    engine_socket: Socket = _about(Path("/run/kvferry/engine.sock"), "Unix socket for engines, mode 0600")
    device: Device = _about("cpu", "the GPU this daemon runs beside, or cpu for host memory")
    node_dir: NodeDir = _about(
        None,
        "a folder that the daemons of one node share, and nobody else: GPU memory is shared there by descriptors, and "
        "mapped over NVLink without a namespace in common",
    )
    roster: Annotated[Dial | None, ADDRESS] = _about(
        None, "peer address of rank 0's daemon, which introduces the ranks to each other"
    )
    arena_mb: Whole = _about(
        512,
        "staging buffer per engine, MiB. Made on GPUs by default; on host memory with way=staged or strict=true, "
        "and with way=auto when a peer's runs are short. 0 disables it",
        ge=0,
    )
    way: Way = _about("auto", "how to move runs; auto: mapped if possible, else staged for short runs, direct for long")
    programs: Whole = _about(
        16,
        "SMs a mapped copy may use. Unpacking a staging slot uses twice that, for about 0.1 ms a slot",
        ge=1,
        le=1024,
    )
    checksum: Flag = _about(
        False, "compare a checksum of all that was read with the source's, before a transfer is done"
    )
    strict: Flag = _about(
        False, "register and export staging slots only: peers can read nothing else; needs TLS in ucx"
    )
    allow_peers: Peers = _about(("127.0.0.0/8", "::1", "localhost"), "addresses that may be dialled and may dial in")
    known_peers: Addresses = _about(
        (),
        "daemons whose engines will be read from: they are met before the first request, and again when they change. "
        "A name stands for all its addresses, as that of a headless service",
    )
    order_tables: Flag = _about(
        True, "orders may name the blocks to write; false: only blocks that the engine reserved"
    )
    token_file: File = _about(None, "bearer tokens of the REST API, one a line; read again on change")
    tls_cert: File = _about(None, "certificate (chain), PEM; read again on change")
    tls_key: File = _about(None, "its private key, PEM")
    tls_ca: File = _about(None, "authority that peers' certificates must be signed by, PEM")
    peer_secret_file: SecretFile = _about(
        None,
        "a secret that all daemons share, where they have no certificates; on a second line the one before; read again "
        "on change",
    )
    rest_tls: Flag = _about(False, "serve REST over mutual TLS with the tls_* files as well")
    share_rest: Flag = _about(
        True, "tell peers where REST listens, so that their pages link to this one. Ranks of one engine are told anyway"
    )
    keep_alive_s: Whole = _about(30, "how long an idle connection to REST is kept", ge=1, le=3600)
    log_format: Literal["text", "json"] = _about("text", "text for people, json for machines")
    log_level: Literal["debug", "info", "warning", "error"] = _about("info", "the least serious line that is logged")
    lease_ttl_s: Seconds = _about(30.0, "life of a lease without a live reader", ge=0.1, le=86400)
    fence_timeout_s: Seconds = _about(30.0, "longest wait for the fence of a publish", ge=0.1, le=3600)
    deadline_s: Seconds = _about(60.0, "life of a transfer whose order names no deadline", ge=0.1, le=3600)
    max_transfers: Whole = _about(256, "unfinished transfers; more orders are answered 429", ge=1)
    max_leases: Whole = _about(4096, "live leases; more are refused", ge=1, le=1 << 20)
    history: Whole = _about(1000, "ended transfers that can still be looked up", ge=0)
    slow_ms: Whole = _about(
        1000,
        "a transfer that takes longer, waits for order, reservation and publish left out, is a warning in the log; "
        "0: none",
        ge=0,
    )
    state: Folder = _about(
        None,
        "a folder for this daemon alone, whose file keeps the history (GET /v1/history) when the process ends, also "
        "that of a keeper. Without it a keeper keeps it in memory, and a daemon of its own begins anew",
    )
    drain_timeout_s: Seconds = _about(300.0, "longest wait for leases to be read at exit", ge=0, le=86400)
    require_rdma: Flag = _about(False, "without RDMA or NVLink, /readyz says no")
    nixl_threads: Whole = _about(0, "extra NIXL worker threads; 0: none", ge=0, le=64)
    ucx: Ucx = _about({}, "extra UCX settings, without the prefix UCX_")
    connect_timeout_s: Seconds = _about(5.0, "longest wait for a peer to answer", ge=0.1, le=600)

    def model_post_init(self, context: object) -> None:
        if not self.advertise:
            self.__dict__["advertise"] = self.peer

    @property
    def tls(self) -> tuple[Path, Path, Path] | None:
        """Certificate, key and authority, where peers (and REST, with rest_tls) speak mutual TLS."""
        files = self.tls_cert, self.tls_key, self.tls_ca
        return files if all(files) else None  # type: ignore[return-value]

    @property
    def url(self) -> str:
        """The REST address for a command on this machine: its certificate is for `advertise`."""
        host, port = split_address(self.rest)
        if is_wildcard(self.rest):
            host = split_address(self.advertise)[0] if self.rest_tls else "127.0.0.1"
        return f"http{'s' if self.rest_tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def rest_url(self) -> str:
        """The REST address for others: on loopback, others of this host alone."""
        if not is_wildcard(self.rest):
            return self.url
        host, port = split_address(self.advertise)[0], split_address(self.rest)[1]
        return f"http{'s' if self.rest_tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"

    def warnings(self) -> Iterator[str]:
        """Settings that are allowed but should be known, a sentence each."""
        if not is_loopback(self.rest) and self.token_file is None and not self.rest_tls:
            yield f"REST listens on {self.rest} and takes requests without a token: set token_file or rest_tls"
        if self.strict and self.may_use_tcp:
            yield "strict = true does not hold over TCP, where UCX checks no key: who reaches UCX reads this process"

        if self.node_dir is not None and self.device == "cpu":
            yield "node_dir has no use with device = cpu: host memory is mapped by no peer"

    @property
    def may_use_tcp(self) -> bool:
        return any(each in self.ucx.get("TLS", "all") for each in ("tcp", "all", "^"))


OPTIONS: Mapping[str, FieldInfo] = Config.model_fields


def written(value: object) -> str:
    """A value as it would be written in a variable; empty for none."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={entry}" for key, entry in value.items())
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def form(field: FieldInfo) -> Form:
    """The form in which a setting is written."""
    for each in field.metadata:
        if isinstance(each, Form):
            return each
    if words := get_args(field.annotation):
        return Form(f"{', '.join(words[:-1])} or {words[-1]}", "|".join(words))
    if field.annotation is bool:
        return Form("true or false", "")
    limits = {key: getattr(each, key) for each in field.metadata for key in ("ge", "le") if hasattr(each, key)}
    text = "from {ge} to {le}".format(**limits) if "le" in limits else "{ge} or more".format(**limits)
    return Form(f"a whole number, {text}", "N") if field.annotation is int else Form(f"seconds, {text}", "SECONDS")


class ConfigError(Malformed):
    """`bad_config`: every wrong setting at once, in `settings`; field, value and remedy are those of a single one."""

    def __init__(self, wrong: Sequence[Malformed]) -> None:
        self.settings = tuple(wrong)
        only = wrong[0]
        if len(wrong) == 1:
            super().__init__(only.code, only.message, field=only.field, value=only.value, remedy=only.remedy)
        else:
            lines = "".join(f"\n  {setting}" for setting in wrong)
            super().__init__(only.code, f"{len(wrong)} settings are wrong:{lines}")


def bad_config(field: str, value: object, why: str, remedy: str) -> Malformed:
    """The error for a wrong setting."""
    return Malformed("bad_config", why, field=field, value=value, remedy=remedy)


REACH = frozenset(("rest", "rest_tls", "token_file", "tls_cert", "tls_key", "tls_ca", "advertise"))


def reach(flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """How a command reaches the daemon of this machine: by the settings that the daemon itself was given.

    Only those are read: a fault in another setting does not keep a command from asking. Raises ConfigError.
    """
    return resolve(flags, environment, REACH)[0]


def resolve(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    only: Set[str] = frozenset(),
) -> tuple[Config, Mapping[str, str]]:
    """The configuration, and where every value came from: `file FILE`, `environment KVFERRY_X`, `flag --x`, `default`.

    flags: raw values by field name, and `config` for the file. environment: the process's where absent. only: the
    settings that are read; all where it is empty. Raises ConfigError (`bad_config`) listing every fault.
    """
    flags, environment = flags or {}, os.environ if environment is None else environment
    wrong: list[Malformed] = []
    values: dict[str, object] = {}
    origins = dict.fromkeys(OPTIONS, "default")

    def found(name: str, value: object, why: str, remedy: str) -> None:
        wrong.append(bad_config(name, repr(value), f"{name} from {origins[name]} {why}", remedy))

    if chosen := flags.get("config") or environment.get(f"{PREFIX}CONFIG"):
        origins["config"] = "flag --config" if flags.get("config") else f"environment {PREFIX}CONFIG"
        try:
            values = tomllib.loads(Path(str(chosen)).read_text(encoding="utf-8"))
        except OSError as error:
            found("config", chosen, f"cannot be read: {error.strerror}", "name a TOML file")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            remedy = 'write TOML, for example arena_mb = 512 or way = "auto"'
            found("config", chosen, f"is not TOML: {error}", remedy)
        origins |= dict.fromkeys(values, f"file {chosen}")
    for name in OPTIONS:
        variable = f"{PREFIX}{name.upper()}"
        if flags.get(name) is not None:
            values[name], origins[name] = flags[name], f"flag --{name.replace('_', '-')}"
        elif environment.get(variable):  # an empty variable is how Kubernetes and shells say unset
            values[name], origins[name] = environment[variable], f"environment {variable}"
    values = {name: value for name, value in values.items() if not only or name in only}
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for fault in error.errors():
            name = str(fault["loc"][0])
            if name in values:  # the first fault of each
                found(name, values.pop(name), *_phrase(name, fault))
    config = Config.model_validate(values)
    for name, why, remedy in _together(config, origins):
        if name not in {each.field for each in wrong}:
            found(name, getattr(config, name), why, remedy)
    if wrong:
        raise ConfigError(wrong)
    return config, origins


def _phrase(name: str, fault: Mapping[str, Any]) -> tuple[str, str]:
    """(what is wrong, what to do) of what pydantic has found."""
    if fault["type"] == "extra_forbidden":
        meant = f"did you mean {nearest(name)}?" if nearest(name) else ""
        return "is not a setting", meant or "remove it; docs/reference/settings.md lists all settings"
    why = str(fault.get("ctx", {}).get("error", re.sub(r"^(Input|String) ", "", fault["msg"])))
    return "is none of the choices" if fault["type"] == "literal_error" else why, f"write {form(OPTIONS[name]).text}"


def nearest(name: str) -> str:
    """The setting that `name` most resembles, or an empty string."""
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), OPTIONS, n=1)), "")


def _together(config: Config, origins: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Rules between settings: (field, what is wrong, what to do)."""
    for name in ("tls_cert", "tls_key", "tls_ca"):
        if not getattr(config, name) and (config.tls_cert or config.tls_key or config.tls_ca):
            yield name, "is missing beside the other tls_* settings", "set all three or none"
    if config.rest_tls and not config.tls:
        yield "rest_tls", "has no certificate", "set tls_cert, tls_key and tls_ca"
    if config.tls and config.peer_secret_file:
        yield "peer_secret_file", "is set beside the tls_* settings", "peers prove themselves in one way: set one"
    if not is_loopback(config.peer) and not config.tls and not config.peer_secret_file:
        remedy = "set peer_secret_file, or tls_cert, tls_key and tls_ca; or listen on 127.0.0.1"
        yield "peer", "is open to other hosts, and its callers need not prove who they are", remedy
    if not config.arena_mb and (config.strict or config.way == "staged"):
        why = f"is too little: {'strict = true' if config.strict else 'way = staged'} needs a staging arena"
        yield "arena_mb", why, "raise arena_mb, or set strict = false and way = auto, direct or mapped"
    if config.strict and "TLS" not in config.ucx:
        why = "does not hold over TCP, which UCX takes if it is not told: there it checks no key"
        remedy = (
            "set TLS in ucx, without tcp: TLS=rc,cuda_copy,cuda_ipc; or with it, if whoever reaches UCX may read all"
        )
        yield "strict", why, remedy
    if config.strict and config.way in ("direct", "mapped"):
        yield "way", "cannot be had with strict = true", "set way = auto or staged, or strict = false"
    if config.advertise.endswith(":0"):
        yield "peer", "has port 0, by which no other daemon reaches this one", "name a port"
    if is_wildcard(config.peer) and origins["advertise"] == "default":
        why = f"is no address to dial, as peer = {config.peer} is every interface"
        yield "advertise", why, "set advertise to the HOST:PORT at which other daemons reach this one"


def misspelt(environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """(variable, the one probably meant) for KVFERRY_* variables that nothing reads.

    They are no error: a Kubernetes service named kvferry puts KVFERRY_SERVICE_HOST and the like into every pod.
    """
    for variable in sorted(os.environ if environment is None else environment):
        name = variable.removeprefix(PREFIX)
        service = re.search(r"(^|_)(SERVICE_(HOST|PORT)|PORT)(_|$)", name)
        if variable.startswith(PREFIX) and name.lower() not in {*OPTIONS, "config"} and not service and nearest(name):
            yield variable, f"{PREFIX}{nearest(name).upper()}"
