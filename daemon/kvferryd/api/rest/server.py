"""What serves the application: uvicorn, over mutual TLS where the settings say so."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from kvferryd.certificates import Certificates
from kvferryd.config import Config
from kvferryd.settings import split_address


def rest_server(app: FastAPI, config: Config, certificates: Certificates | None = None) -> uvicorn.Server:
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
        assert certificates is not None
        settings.ssl = certificates.server_context()
    return uvicorn.Server(settings)
