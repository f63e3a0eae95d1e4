"""A client of daemons with `rest_tls` shows a certificate to them, and asks for theirs."""

from __future__ import annotations

import os
import ssl
from typing import TypeAlias

File: TypeAlias = str | os.PathLike[str]


def proof(certificate: File, key: File, authority: File) -> ssl.SSLContext:
    """For the `tls` of a RouterClient. The files are read now, all PEM. Raises OSError, as SSLError is one."""
    context = ssl.create_default_context(cafile=authority)
    context.load_cert_chain(certificate, key, no_password)
    return context


def no_password() -> str:
    """Instead of OpenSSL, which would ask the terminal."""
    raise OSError("the private key has a password, and nobody is there to type it")
