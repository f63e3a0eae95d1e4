"""The flags of `kvferry proxy`, checked once, as frozen values."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import httpx
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvferry import __version__
from kvferry.flags import add_flags, checked
from kvferry.tls import proof

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
  Without daemon= those blocks stay held until the lease's ttl. To daemons with rest_tls (daemon=https://...) the proxy
  proves itself by --daemon-tls-cert, --daemon-tls-key and --daemon-tls-ca, which it reads when it starts.

fleet
  --fleet   a page at /fleet/, and the same as JSON at /v1/fleet: a row for each pair of engines, what fails, what was
            slow, which daemon does not answer. Whoever may call the proxy may see it, ids and addresses included.

requests
  X-Request-Id             the first 128 characters, and a random suffix, are the id on both legs; the answer has the id
                           that the client sent, and in x-kvferry-request-id the lease's
  x-prefiller-host-port    host:port[,host:port]: use one of these prefill engines; 403 for one that is not configured
  A client that takes nothing of its answer for 10 s is let go, and its request at the decode engine with it; so is one
  that sends nothing for 30 s in the middle of a body, or has not sent the header of a request within 5 s.

examples
  kvferry proxy --prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200

  kvferry proxy --order router --listen 0.0.0.0:8000 \\
      --prefill http://10.0.0.7:8100,daemon=http://10.0.0.7:7410 \\
      --decode http://10.0.0.8:8200,daemon=http://10.0.0.8:7410,daemon=http://10.0.0.8:7420

  curl localhost:8000/v1/completions -d '{"model": "m", "prompt": "Once", "max_tokens": 16, "stream": true}'
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine's base URL, and the REST URLs of its ranks' daemons, rank 0 first (empty where not given)."""

    url: str
    daemons: tuple[str, ...] = ()

    @property
    def host_port(self) -> str:
        """As x-prefiller-host-port names it."""
        url = httpx.URL(self.url)
        netloc = url.netloc.decode()
        return netloc if url.port else f"{netloc}:{443 if url.scheme == 'https' else 80}"


def endpoint(text: str | Endpoint) -> Endpoint:
    """`URL[,daemon=URL]...` as an Endpoint. Raises ValueError."""
    if isinstance(text, Endpoint):
        return text
    url, *rest = text.split(",")
    daemons = []
    for part in rest:
        key, _, value = part.partition("=")
        if key.strip() != "daemon":
            raise ValueError(f"{part!r} in {text!r} is not understood: write ,daemon=http://host:7410")
        daemons.append(_base_url(value))
    return Endpoint(_base_url(url), tuple(daemons))


def _base_url(text: str) -> str:
    try:
        url = httpx.URL(text.strip() if "://" in text else f"http://{text.strip()}")
        fine = url.scheme in ("http", "https") and url.host and (url.port is None or 0 < url.port < 1 << 16)
    except httpx.InvalidURL:
        fine = False
    if not fine or url.path != "/" or url.query or url.userinfo:
        raise ValueError(f"{text!r} is no base URL such as http://10.0.0.7:8100, without a path such as /v1")
    return str(url).rstrip("/")


Endpoints = tuple[Annotated[Endpoint, BeforeValidator(endpoint)], ...]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Count = Annotated[int, Field(gt=0, le=1 << 20)]
ENGINE = ["URL[,daemon=URL]..."]


class Options(BaseModel):
    """Times in seconds; each bounds the leg to one engine, connecting included. Described fields are flags."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="forbid")

    prefill: Endpoints = Field(examples=ENGINE, description="a prefill engine; repeatable")
    decode: Endpoints = Field(examples=ENGINE, description="a decode engine; repeatable")
    order: Literal["engine", "router"] = Field(default="engine", description="who orders the transfer")
    host: str = "127.0.0.1"
    port: int = 8000
    api_token: str = ""
    daemon_token: str = ""
    connect_timeout_s: Seconds = Field(
        default=5.0, alias="connect_timeout", description="until a connection to an engine stands"
    )
    prefill_timeout_s: Seconds = Field(
        default=120.0, alias="prefill_timeout", description="for each prefill engine that is asked"
    )
    decode_timeout_s: Seconds = Field(
        default=600.0, alias="decode_timeout", description="for each decode engine that is asked, its stream included"
    )
    order_timeout_s: Seconds = Field(
        default=30.0, alias="order_timeout", description="for placing the order, waiting for a full daemon included"
    )
    prefill_attempts: Count = Field(
        default=3, description="prefill engines to try when one is down, hangs or answers 502, 503 or 504"
    )
    decode_attempts: Count = Field(
        default=3, description="decode engines to try when one is down or answers 502, 503 or 504"
    )
    when_no_prefill: Literal["refuse", "recompute"] = Field(
        default="refuse",
        description="what happens when no prefill engine answers: the client is told, or decode computes the prompt",
    )
    keep_alive_s: Annotated[int, Field(gt=0, le=86400)] = Field(
        default=5, alias="keep_alive", examples=["S"], description="how long a client's idle connection is kept"
    )
    max_connections: Count = Field(default=4096, description="to all engines")
    max_body_mb: float = Field(default=32, gt=0, examples=["N"], description="largest request body in MiB")

    daemon_tls_cert: str = Field(
        default="", examples=["FILE"], description="the proxy's certificate for daemons at https://, PEM"
    )
    daemon_tls_key: str = Field(default="", examples=["FILE"], description="its private key, PEM")
    daemon_tls_ca: str = Field(default="", examples=["FILE"], description="authority of the daemons' certificates, PEM")
    fleet: bool = Field(default=False, description="show what all daemons do, at /fleet/ and /v1/fleet")

    @model_validator(mode="after")
    def _daemons_for_orders(self) -> Options:
        for decode in self.decode:
            if self.order == "router" and not decode.daemons:
                example = f"--decode {decode.url},daemon=http://HOST:7410"
                raise ValueError(
                    f"--order router orders at the decode daemons, and --decode {decode.url} names none: {example}"
                )
        return self

    @model_validator(mode="after")
    def _usable_certificates(self) -> Options:
        self.daemon_tls  # noqa: B018  its files are read now
        return self

    @cached_property
    def daemon_tls(self) -> ssl.SSLContext:
        """The proxy shows this to daemons at https://, and asks it of them. Raises ValueError."""
        files = self.daemon_tls_cert, self.daemon_tls_key, self.daemon_tls_ca
        if not any(files):
            return httpx.create_ssl_context(trust_env=False)
        if not all(files):
            raise ValueError("--daemon-tls-cert, --daemon-tls-key and --daemon-tls-ca go together: give all three")
        try:
            return proof(*files)
        except OSError as error:  # an SSLError too
            given = f"--daemon-tls-cert {files[0]}, --daemon-tls-key {files[1]}, --daemon-tls-ca {files[2]}"
            raise ValueError(f"{given} cannot be used ({error}): give a pair, and the daemons' authority") from None


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the flags. Exits with 2 and one line that says what to change, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="kvferry proxy", usage="kvferry proxy --prefill URL --decode URL [options]", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    help = "default: 127.0.0.1:8000; *:8000 is every interface, IPv4 and IPv6"
    add("--listen", type=_listen, default="127.0.0.1:8000", metavar="HOST:PORT", help=help)
    for whose, help in {
        "api": "clients must send this bearer token; it is not passed on to the engines",
        "daemon": "bearer token of the daemons' REST service",
    }.items():
        name, default = f"{whose}_token", argparse.SUPPRESS
        add(f"--{whose}-token-file", type=_token, default=default, dest=name, metavar="FILE", help=help)
    add_flags(parser, Options)
    add("--version", action="version", version=f"kvferry {__version__}")
    args = parser.parse_args(argv)
    args.host, args.port = args.listen
    return checked(parser, Options, args)


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
