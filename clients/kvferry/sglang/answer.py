"""The bootstrap address of a prefill server: the first DP rank answers there for all of them, which are processes of
one host that SGLang tells nothing of each other."""

from __future__ import annotations

import socket
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

import httpx

from kvferry.sglang.bootstrap import ASK_S, PATH, Prefill


class _At(ThreadingHTTPServer):
    """At a host of IPv4, or else of IPv6; at `::` for both."""

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = min(each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        super().__init__((host, port), handler)


class _Beside(ThreadingHTTPServer):
    """At an abstract Unix socket."""

    address_family = socket.AF_UNIX
    server_bind = TCPServer.server_bind  # HTTPServer's looks for a host and a port


def answer(host: str, port: int, dp_rank: int, dp_ranks: int, said: Prefill) -> None:
    """Say which engine this DP rank is, and on the first one which the others are. Raises OSError."""
    beside = [f"\0kvferry-bootstrap-{port}-{each}" for each in range(dp_ranks)]

    class Handler(BaseHTTPRequestHandler):
        timeout = ASK_S

        def do_GET(self) -> None:
            if self.path != PATH:
                self.send_error(404)
                return
            try:
                known = [said, *map(_ask, () if dp_rank else beside[1:])]
            except (httpx.HTTPError, ValueError) as error:
                self.send_error(503, explain=f"a DP rank has not started: {error}")
                return
            self.send_response(200)
            self.end_headers()
            together = said.model_copy(update={"sources": [each.sources[0] for each in known]})
            self.wfile.write(together.model_dump_json(exclude_none=True).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = _Beside(beside[dp_rank], Handler) if dp_rank else _At(host, port, Handler)  # type: ignore[arg-type]  # typeshed has no names
    threading.Thread(target=server.serve_forever, name="kvferry-bootstrap", daemon=True).start()


@cache
def _ask(name: str) -> Prefill:
    """The other DP rank about itself: the same for its whole life, which is this one's. Raises httpx.HTTPError,
    ValueError."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=name), timeout=ASK_S / 2) as http:
        return Prefill.model_validate_json(http.get(f"http://kvferry{PATH}").raise_for_status().content)
