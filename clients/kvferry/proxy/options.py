"""The flags of `kvferry proxy`, checked once, as frozen values."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvferry import __version__

DESCRIPTION = """\
The reference routing proxy of kvferry: one OpenAI-compatible door in front of prefill and decode engines.

For each request: the prompt goes to a prefill engine (one token, not streamed), its kv_transfer_params come back,
the original request goes to a decode engine with them, and decode's answer streams to the client untouched.
"""

EPILOG = """\
who orders the transfer
  --order engine   the decode engine asks its own daemon, from kv_transfer_params, as behind today's routers
  --order router   the proxy orders it at the decode daemon's REST service as soon as prefill has answered, while the
                   request is still on its way to decode; every --decode then needs its daemon=

daemons
  Name the REST service of each rank's daemon behind an engine with ,daemon=URL (repeatable, rank 0 first). An order
  goes to the first; when a client leaves or decode refuses, the proxy frees the request's blocks at all of them.
  Without daemon= those blocks stay held until the lease's ttl.

requests
  X-Request-Id             the first 128 characters, and a random suffix, are the id on both legs; the answer has the id
                           that the client sent, and in x-kvferry-request-id the lease's
  x-prefiller-host-port    host:port[,host:port]: use one of these prefill engines; 403 for one that is not configured

examples
  kvferry proxy --prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200

  kvferry proxy --order router --listen 0.0.0.0:8000 \\
      --prefill http://10.0.0.7:8100,daemon=http://10.0.0.7:7410 \\
      --decode http://10.0.0.8:8200,daemon=http://10.0.0.8:7410,daemon=http://10.0.0.8:7420

  curl localhost:8000/v1/completions -d '{"model": "m", "prompt": "Once", "max_tokens": 16, "stream": true}'
"""


class OrderedBy(enum.StrEnum):
    """What tells the decode side's daemon where the KV is."""

    ENGINE = "engine"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine's base URL, and the REST URLs of its ranks' daemons, rank 0 first (empty where not given)."""

    url: str
    daemons: tuple[str, ...] = ()

    @property
    def host_port(self) -> str:
        """As x-prefiller-host-port names it."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"{parts.netloc.rpartition(':')[0] if parts.port else parts.netloc}:{port}".lower()


@dataclass(frozen=True, slots=True)
class Options:
    """Times in seconds; each bounds a whole leg, connecting and reading included."""

    prefill: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]
    order: OrderedBy = OrderedBy.ENGINE
    host: str = "127.0.0.1"
    port: int = 8000
    api_token: str = ""
    daemon_token: str = ""
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 120.0
    decode_timeout_s: float = 600.0
    order_timeout_s: float = 30.0
    prefill_attempts: int = 3
    max_body_bytes: int = 32 << 20
    max_connections: int = 4096


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the flags. Exits with 2 and one line that says what to change, as argparse does."""
    parser = _parser()
    flags = vars(parser.parse_args(argv))
    host, port = flags.pop("listen")
    flags |= {"prefill": tuple(flags["prefill"]), "decode": tuple(flags["decode"]), "order": OrderedBy(flags["order"])}
    options = Options(**flags, host=host, port=port)
    for endpoint in options.decode:
        if options.order is OrderedBy.ROUTER and not endpoint.daemons:
            parser.error(
                f"--order router orders at the decode daemons, and --decode {endpoint.url} names none: "
                f"--decode {endpoint.url},daemon=http://HOST:7410"
            )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry proxy",
        usage="kvferry proxy --prefill URL --decode URL [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    default = {field.name: field.default for field in dataclasses.fields(Options)}
    engine = "URL[,daemon=URL]..."
    for name in ("prefill", "decode"):
        add(f"--{name}", type=endpoint, action="append", required=True, metavar=engine,
            help=f"a {name} engine; repeatable")  # fmt: skip
    add("--order", choices=[who.value for who in OrderedBy], default="engine", help="who orders (default: engine)")
    add("--listen", type=_listen, default=("127.0.0.1", 8000), metavar="HOST:PORT", help="default: 127.0.0.1:8000")
    add("--api-token-file", type=_token, default=argparse.SUPPRESS, dest="api_token", metavar="FILE",
        help="clients must send this bearer token; it is not passed on to the engines")  # fmt: skip
    add("--daemon-token-file", type=_token, default=argparse.SUPPRESS, dest="daemon_token", metavar="FILE",
        help="bearer token of the daemons' REST service")  # fmt: skip
    for name, what in (
        ("connect", "until a connection to an engine stands"),
        ("prefill", "for the prefill leg"),
        ("decode", "for the decode leg, its whole stream included"),
        ("order", "for placing the order, waiting for a full daemon included"),
    ):
        seconds = default[f"{name}_timeout_s"]
        add(f"--{name}-timeout", type=_seconds, default=seconds, dest=f"{name}_timeout_s", metavar="S",
            help=f"{what} (default: {seconds:g})")  # fmt: skip
    for name, what in (
        ("prefill-attempts", "prefill engines to try when one is down or answers 502, 503 or 504"),
        ("max-connections", "to all engines"),
    ):
        count = default[name.replace("-", "_")]
        add(f"--{name}", type=_count, default=count, metavar="N", help=f"{what} (default: {count})")
    add("--max-body-mb", type=lambda text: _count(text) << 20, default=default["max_body_bytes"],
        dest="max_body_bytes", metavar="N", help="largest request body in MiB (default: 32)")  # fmt: skip
    add("--version", action="version", version=f"kvferry {__version__}")
    return parser


def endpoint(text: str) -> Endpoint:
    """`URL[,daemon=URL]...` as an Endpoint. Raises argparse.ArgumentTypeError."""
    url, *rest = text.split(",")
    daemons = []
    for part in rest:
        key, _, value = part.partition("=")
        if key.strip() != "daemon":
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r} is not understood: write ,daemon=http://host:7410")
        daemons.append(_base_url(value))
    return Endpoint(_base_url(url), tuple(daemons))


def _base_url(text: str) -> str:
    url = text.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        bad = True
    if bad:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://10.0.0.7:8100")
    if parts.path or parts.query or parts.username:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a base URL: scheme, host and port, without a path such as /v1"
        )
    return url


def _listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:8000")
    return host.strip("[]") or "127.0.0.1", int(port)


def _token(path: str) -> str:
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read a token from {path!r}: {error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise argparse.ArgumentTypeError(f"{path!r} must hold one line of printable ASCII: the token")
    return token


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, above 0 and at most a day")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
