"""The daemon that a command asks over REST, by this machine's settings."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
from pathlib import Path

from kvferry import __version__
from kvferry.errors import Malformed
from kvferry.router import RouterClient
from kvferry.tls import proof
from kvferryd.config import Config, bad_config

DONE, NOT_SO = 0, 1
"""Exit statuses: yes and no; cli.FAILED is for errors."""


def client(config: Config, arguments: argparse.Namespace) -> RouterClient:
    """The client of the daemon named by --daemon, else of this machine's."""
    return at(config, arguments.daemon or config.url)


def at(config: Config, url: str) -> RouterClient:
    """The client of the daemon there, with what proves this machine's."""
    if "://" not in url:
        url = f"http://{url}"
    tls = _tls(config) if url.startswith("https:") else None
    name = f"kvferry/{__version__}; user {os.getuid()} at {socket.gethostname()}"
    return RouterClient(url, token=_token(config.token_file), tls=tls, name=name)


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
    return next(filter(None, lines), "")


def _tls(config: Config) -> ssl.SSLContext | None:
    """A daemon asks its clients for a certificate; ours is that of this machine's daemon."""
    if config.tls is None:
        return None
    certificate, key, authority = config.tls
    try:
        return proof(certificate, key, authority)
    except OSError as error:  # an SSLError too
        remedy = "tls_cert and tls_key are a pair, tls_ca the authority that signed the daemon's certificate"
        why = f"the certificates cannot be used: {error}"
        raise bad_config("tls_cert", certificate, why, remedy) from None


def bad_argument(flag: str, value: object, remedy: str) -> Malformed:
    return Malformed("bad_argument", f"{flag} cannot be understood", field=flag, value=value, remedy=remedy)
