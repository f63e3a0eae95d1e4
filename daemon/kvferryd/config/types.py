"""The types of settings: what pydantic does not check itself, and how each is written by people."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, StringConstraints

SOCKET_PATH_LIMIT = 104
"""Bytes. Linux takes 107; the handover socket lies beside the engine socket, and its path is 3 bytes longer."""

NODE_SOCKET = 24
"""Bytes of a socket's name in the folder that the daemons of a node share."""
SHORTEST_SECRET = 32
"""Characters. A guess can be checked against a certificate that anybody may see."""


class Wrong(ValueError):
    """Why a value is refused, as a phrase that follows its name: `is an empty file`."""


@dataclass(frozen=True, slots=True)
class Form:
    """A value's form, for people, and the short word for it in a flag's help."""

    text: str
    metavar: str


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port), the host without brackets. Raises `Wrong`.

    A host is an IP, a name or `*`: gRPC reads a target as a URI, in which `?`, `#` and `%` end or change the host.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+|\*)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > 65535 or (match[1] and not isinstance(_ip(match[1]), ipaddress.IPv6Address)):
        raise Wrong("is not an address")
    return match[1] or match[2], int(match[3])


def is_wildcard(address: str) -> bool:
    """Whether it means every interface: an address to listen on, and none to dial."""
    host = split_address(address)[0]
    return host == "*" or ((ip := _ip(host)) is not None and ip.is_unspecified)


def is_loopback(address: str) -> bool:
    host = split_address(address)[0]
    return host == "localhost" or ((ip := _ip(host)) is not None and ip.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _listen(address: str) -> str:
    split_address(address)
    return address


def _dial(address: str) -> str:
    # A manifest has brackets round $(POD_IP), of whichever family it is.
    address = re.sub(r"^\[([0-9.]+)\]:", r"\1:", address)
    if split_address(address)[1] == 0 or is_wildcard(address):
        raise Wrong("is no address that another daemon could dial")
    return address


def _no_flag(raw: object) -> object:
    if isinstance(raw, bool):  # pydantic takes true for 1
        raise Wrong("is not a number")
    return raw


def _socket(path: Path) -> Path:
    if not path.is_absolute():
        raise Wrong("is not an absolute path")
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise Wrong(f"is longer than the {SOCKET_PATH_LIMIT} bytes that a Unix socket's path may have")
    return path


def _folder(path: Path) -> Path:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path.absolute()
    except (OSError, ValueError) as error:  # its name is too long, or has a NUL; nobody may look into its parent
        raise Wrong(f"cannot be looked at: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISDIR(mode):
        raise Wrong("is no folder")
    return path.absolute()


def _node_dir(path: Path) -> Path:
    if not path.is_absolute() or len(os.fsencode(path)) > SOCKET_PATH_LIMIT - NODE_SOCKET:
        raise Wrong(f"is not an absolute path of at most {SOCKET_PATH_LIMIT - NODE_SOCKET} bytes")
    return path


def _file(path: Path) -> Path:
    """A file that is there, can be read and is not empty: better known at the start than at the first request."""
    try:
        with path.open("rb") as opened:
            if not opened.read(1):
                raise Wrong("is an empty file")
    except OSError as error:
        raise Wrong(f"cannot be read: {error.strerror}") from None
    return path.absolute()


def secrets_in(file: Path) -> list[bytes]:
    """The secret that peers share and, on a second line, the one before. Raises `Wrong`, OSError."""
    secrets = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
    if not 1 <= len(secrets) <= 2 or min(map(len, secrets)) < SHORTEST_SECRET:
        raise Wrong(f"has not one or two lines of {SHORTEST_SECRET} characters or more")
    return secrets


def _secret_file(path: Path) -> Path:
    file = _file(path)
    secrets_in(file)
    return file


def _words(raw: object, between: str) -> list[str]:
    texts: Sequence[Any] = raw if isinstance(raw, list | tuple) else [raw]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise Wrong("is not a text")
    return [word for text in texts for word in re.split(between, text) if word]


def _peers(raw: object) -> tuple[str, ...]:
    entries = _words(raw, r"[\s,]+")
    for entry in entries:
        try:
            if "/" in entry:
                ipaddress.ip_network(entry)
            elif ":" in entry or re.fullmatch(r"[\d.]+", entry):
                ipaddress.ip_address(entry)
            elif not re.fullmatch(r"[A-Za-z0-9_.*?-]+", entry):
                raise ValueError("a host name has letters, digits and _.*?-")
        except ValueError as error:
            raise Wrong(f"holds {entry!r}, which is no network, IP address (without a port) or host: {error}") from None
    return tuple(dict.fromkeys(entries))


def _ucx(raw: object) -> dict[str, str]:
    """UCX values hold commas and colons, never blanks: `TLS=rc,cuda_ipc NET_DEVICES=mlx5_0:1`."""
    if not isinstance(raw, Mapping):
        raw = dict(pair.partition("=")[::2] for pair in _words(raw, r"\s+"))
    pairs = {}
    for key, value in raw.items():
        name = str(key).removeprefix("UCX_")
        pairs[name] = text = ("y" if value else "n") if isinstance(value, bool) else str(value)
        if isinstance(value, Mapping | list) or not re.fullmatch(r"[A-Z][A-Z0-9_]*=\S+", f"{name}={text}"):
            raise Wrong(f"holds {name!r} = {value!r}, which is no UCX variable with its value")
    return pairs


ADDRESS = Form("HOST:PORT, with brackets round IPv6", "HOST:PORT")
Listen = Annotated[str, AfterValidator(_listen), ADDRESS]
"""Port 0 takes a free one, a wildcard every interface: `*` and `[::]` of IPv4 and IPv6."""
Dial = Annotated[str, AfterValidator(_dial), ADDRESS]
Addresses = Annotated[
    tuple[Dial, ...],
    BeforeValidator(lambda raw: tuple(dict.fromkeys(_words(raw, r"[\s,]+"))) if raw else ()),
    Form("HOST:PORT, with commas between", "HOST:PORT,..."),
]
Flag = Annotated[bool, BeforeValidator(lambda raw: raw.strip() if isinstance(raw, str) else raw)]
Whole = Annotated[int, BeforeValidator(_no_flag)]
Seconds = Annotated[float, BeforeValidator(_no_flag)]
File = Annotated[Annotated[Path, AfterValidator(_file)] | None, Form("a path of a readable file", "FILE")]
Folder = Annotated[
    Annotated[Path, AfterValidator(_folder)] | None, Form("a path of a folder, which is made if need be", "FOLDER")
]
SecretFile = Annotated[
    Annotated[Path, AfterValidator(_secret_file)] | None,
    Form(f"a path of a file with one or two lines of {SHORTEST_SECRET} characters or more", "FILE"),
]
Socket = Annotated[
    Path, AfterValidator(_socket), Form(f"an absolute path of at most {SOCKET_PATH_LIMIT} bytes", "PATH")
]
NodeDir = Annotated[
    Annotated[Path, AfterValidator(_node_dir)] | None,
    Form(f"an absolute path of at most {SOCKET_PATH_LIMIT - NODE_SOCKET} bytes", "PATH"),
]
Device = Annotated[
    str,
    StringConstraints(pattern=r"^(cpu|cuda:(0|[1-9]\d{0,3}))$"),
    Form("cpu, or cuda:N with the GPU's number", "DEVICE"),
]
Peers = Annotated[
    tuple[str, ...],
    BeforeValidator(_peers),
    Form("CIDRs, IP addresses or host names with * and ?, with commas between", "PEER,..."),
]
Ucx = Annotated[
    Mapping[str, str], BeforeValidator(_ucx), Form("NAME=VALUE with blanks between, or a TOML table", "NAME=VALUE")
]
