"""The reference routing proxy: an OpenAI-compatible door in front of prefill and decode engines.

`main` is `kvferry proxy` and `python -m kvferry.proxy`; `build_app` is the application for tests and embedding.
Read legs.py (what is sent where), then exchange.py (one request's way), then app.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Sequence
from itertools import chain
from types import FrameType

import uvicorn

from kvferry.descriptors import open_standard, raise_limit
from kvferry.listening import EVERYWHERE, HeaderInTime, everywhere
from kvferry.proxy.app import build_app
from kvferry.proxy.log import Handler
from kvferry.proxy.options import Endpoint, Options, parse

__all__ = ["Endpoint", "Options", "build_app", "main", "parse"]
UNREAD_S = 10
"""How long a client may leave its answer unread. Then the kernel ends the connection, and the request with it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. Answers under way then have as long as any has of decode, until a second signal.
    Returns the exit status; argparse exits with 2 on wrong flags."""
    open_standard()
    options, lines = parse(argv), Handler()
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    prefills, decodes = (", ".join(each.url for each in engines) for engines in (options.prefill, options.decode))
    logging.getLogger("kvferry.proxy").info(
        "kvferry proxy on http://%s:%d: prefill %s; decode %s; orders by the %s",
        options.host, options.port, prefills, decodes, options.order,
    )  # fmt: skip
    if (handles := raise_limit()) < 2 * options.max_connections:
        what = "%d file handles are fewer than %d connections to engines, and as many to clients, may need: ulimit -n"
        logging.getLogger("kvferry.proxy").warning(what, handles, options.max_connections)
    config = uvicorn.Config(
        build_app(options), http=HeaderInTime, host=options.host, port=options.port, lifespan="on",
        log_config=None, log_level="warning", access_log=False,
        timeout_graceful_shutdown=math.ceil(options.decode_timeout_s), timeout_keep_alive=options.keep_alive_s,
    )  # fmt: skip
    try:
        sockets = everywhere(options.port) if options.host in EVERYWHERE else None
    except OSError as error:
        logging.getLogger("kvferry.proxy").error("cannot listen on port %d: %s", options.port, error.strerror)
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, lines).run(sockets)
    return 0


class _Server(uvicorn.Server):
    """On every address that its host's name has. The kernel ends connections on which nothing is read.

    lines: flushed at the end: uvicorn raises the signal that ended it once more, and nothing runs behind that.
    """

    def __init__(self, config: uvicorn.Config, lines: Handler) -> None:
        super().__init__(config)
        self._lines = lines

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends it at once, with all connections: from Python 3.12 on asyncio waits for them."""
        if self.should_exit:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        listeners = chain.from_iterable(server.sockets for server in self.servers) if self.started else ()
        for listener in listeners:  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._lines.flush()
