"""What serves the application: uvicorn, over mutual TLS where the settings say so."""

from __future__ import annotations

import ssl
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from kvferryd import logs
from kvferryd.config import Config
from kvferryd.settings import split_address

log = logs.get(__name__)


def rest_server(app: FastAPI, config: Config) -> uvicorn.Server:
    """A server for `config.rest`, not yet started. Its owner awaits `serve()` and ends it with `should_exit`.

    Lines go where `kvferryd.logs` sends them. Long polls that are open at the end are cut after two seconds.
    """
    host, port = split_address(config.rest)
    settings = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,  # nobody's word for who the client is
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    settings.load()
    if config.rest_tls:
        settings.ssl = _tls(config)
    return uvicorn.Server(settings)


def _tls(config: Config) -> ssl.SSLContext:
    """Mutual TLS. Replaced files are read at the next handshake; while they do not fit, the old ones stay."""
    cert, key, ca = config.tls_cert, config.tls_key, config.tls_ca
    assert cert is not None
    assert key is not None
    assert ca is not None
    current, seen = _context(cert, key, ca), _stamps(cert, key, ca)

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        nonlocal current, seen
        try:
            now = _stamps(cert, key, ca)
            if now != seen:
                current, seen = _context(cert, key, ca), now
                log.info("certificates were read again", tls_cert=str(cert))
        except OSError as error:  # ssl.SSLError is one
            log.error("new certificates do not fit, the old ones stay", reason=str(error))
        connection.context = current

    front = _context(cert, key, ca)
    front.sni_callback = renew
    return front


def _context(cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _stamps(*files: Path) -> list[tuple[int, int]]:
    return [(status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in files)]
