"""The kinds of value a setting can have: how each is read from TOML, a variable or a flag, and written for people."""

from __future__ import annotations

import enum
import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

SOCKET_PATH_LIMIT = 104
"""Bytes. Linux takes 107; the handover socket lies beside the engine socket, and its path is 3 bytes longer."""


class Wrong(Exception):
    """Why a value is refused, as a phrase that follows its name: `is not a whole number`."""


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Kind:
    """form: what to write, for people. read: raw value to value, raising `Wrong`. many: a flag may be repeated."""

    form: str
    metavar: str
    read: Callable[[object], object]
    many: bool = False

    def write(self, value: object) -> str:
        """A value as it would be written in a variable; empty for none."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, Mapping):
            return " ".join(f"{key}={entry}" for key, entry in value.items())
        return f"{value:g}" if isinstance(value, float) else str(value)


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port), the host without brackets. Raises `Wrong`.

    A host is an IP, a name or `*`: gRPC reads a target as a URI, in which `?`, `#` and `%` end or change the host.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+|\*)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise Wrong("is not an address")
    if match[1]:
        try:
            ipaddress.IPv6Address(match[1])
        except ValueError:
            raise Wrong("is not an address: what stands in brackets is no IPv6 address") from None
    return match[1] or match[2], int(match[3])


def is_wildcard(address: str) -> bool:
    """Whether it means every interface: an address to listen on, and none to dial."""
    host = _host(address)
    return host == "*" or (_is_ip(host) and ipaddress.ip_address(host).is_unspecified)


def is_loopback(address: str) -> bool:
    host = _host(address)
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def address(*, any_port: bool) -> Kind:
    """any_port: an address to listen on, where port 0 takes a free one and a wildcard every interface."""

    def read(raw: object) -> str:
        text = _text(raw)
        if not any_port and (split_address(text)[1] == 0 or is_wildcard(text)):
            raise Wrong("is no address that another daemon could dial")
        split_address(text)
        return text

    return Kind("HOST:PORT, with brackets round IPv6", "HOST:PORT", read)


def whole(least: int, most: int | None = None) -> Kind:
    def read(raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise Wrong("is not a whole number")
        try:
            value = int(raw)
        except ValueError:
            raise Wrong("is not a whole number") from None
        return int(_within(value, least, most))

    return Kind(f"a whole number, {_limits(least, most)}", "N", read)


def number(least: float, most: float) -> Kind:
    def read(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise Wrong("is not a number")
        try:
            value = float(raw)
        except ValueError:
            raise Wrong("is not a number") from None
        if not math.isfinite(value):
            raise Wrong("is not finite")
        return _within(value, least, most)

    return Kind(f"seconds, {_limits(least, most)}", "SECONDS", read)


def flag() -> Kind:
    words = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)

    def read(raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        if not isinstance(raw, str) or raw.strip().lower() not in words:
            raise Wrong("is neither true nor false")
        return words[raw.strip().lower()]

    return Kind("true or false", "", read)


def one_of(*words: str) -> Kind:
    def read(raw: object) -> str:
        if raw not in words:
            raise Wrong("is none of the choices")
        return str(raw)

    return Kind(", ".join(words[:-1]) + f" or {words[-1]}", "|".join(words), read)


def member(words: type[enum.StrEnum]) -> Kind:
    choice = one_of(*words)
    return Kind(choice.form, choice.metavar, lambda raw: words(str(choice.read(raw))))


def device() -> Kind:
    def read(raw: object) -> str:
        text = _text(raw)
        if not re.fullmatch(r"cpu|cuda:(0|[1-9]\d{0,3})", text):
            raise Wrong("is not a device")
        return text

    return Kind("cpu, or cuda:N with the GPU's number", "DEVICE", read)


def socket_path() -> Kind:
    def read(raw: object) -> Path:
        path = _absolute(raw)
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            raise Wrong(f"is longer than the {SOCKET_PATH_LIMIT} bytes that a Unix socket's path may have")
        return path

    return Kind(f"an absolute path of at most {SOCKET_PATH_LIMIT} bytes", "PATH", read)


def readable_file() -> Kind:
    """A file that is there, can be read and is not empty: better known at the start than at the first request."""

    def read(raw: object) -> Path:
        path = Path(_text(raw))
        try:
            with path.open("rb") as opened:
                if not opened.read(1):
                    raise Wrong("is an empty file")
        except OSError as error:
            raise Wrong(f"cannot be read: {error.strerror}") from None
        return path.absolute()

    return Kind("a path of a readable file", "FILE", read)


def peers() -> Kind:
    def read(raw: object) -> tuple[str, ...]:
        entries = [entry for part in _listed(raw) for entry in re.split(r"[\s,]+", part.strip()) if entry]
        for entry in entries:
            _check_peer(entry)
        return tuple(dict.fromkeys(entries))

    return Kind("CIDRs, IP addresses or host names with * and ?, with commas between", "PEER,...", read, many=True)


def ucx() -> Kind:
    """UCX values hold commas and colons, never blanks: `TLS=rc,cuda_ipc NET_DEVICES=mlx5_0:1`."""

    def read(raw: object) -> Mapping[str, str]:
        pairs: list[tuple[str, object]]
        if isinstance(raw, Mapping):
            pairs = [(str(name), value) for name, value in raw.items()]
        else:
            pairs = []
            for pair in (pair for part in _listed(raw) for pair in part.split()):
                if "=" not in pair:
                    raise Wrong(f"lacks an = in {pair!r}")
                name, _, text = pair.partition("=")
                pairs.append((name, text))
        read_pairs = {}
        for name, value in pairs:
            name = name.removeprefix("UCX_")
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
                raise Wrong(f"holds {name!r}, which is no UCX variable")
            if isinstance(value, Mapping | list) or not str(value) or re.search(r"\s", str(value)):
                raise Wrong(f"holds {value!r} for {name}, which is no UCX value")
            read_pairs[name] = ("y" if value else "n") if isinstance(value, bool) else str(value)
        return MappingProxyType(read_pairs)

    return Kind("NAME=VALUE with blanks between, or a TOML table", "NAME=VALUE", read, many=True)


_Number = TypeVar("_Number", int, float)


def _within(value: _Number, least: float, most: float | None) -> _Number:
    if value < least or (most is not None and value > most):
        raise Wrong("is out of range")
    return value


def _limits(least: float, most: float | None) -> str:
    return f"{least:g} or more" if most is None else f"from {least:g} to {most:g}"


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise Wrong("is not a text")
    return raw.strip()


def _listed(raw: object) -> list[str]:
    entries = raw if isinstance(raw, list | tuple) else [raw]
    return [_text(entry) for entry in entries]


def _absolute(raw: object) -> Path:
    path = Path(_text(raw))
    if not path.is_absolute():
        raise Wrong("is not an absolute path")
    return path


def _host(address: str) -> str:
    return split_address(address)[0]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_peer(entry: str) -> None:
    if "/" in entry:
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            raise Wrong(f"holds {entry!r}, which is no network: {error}") from None
    elif re.fullmatch(r"[\d.]+", entry) or ":" in entry:
        if not _is_ip(entry):
            raise Wrong(f"holds {entry!r}, which is no IP address (a port does not belong here)")
    elif not re.fullmatch(r"[A-Za-z0-9_.*?-]+", entry):
        raise Wrong(f"holds {entry!r}, which is no host name")
