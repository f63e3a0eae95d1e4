"""Errors over gRPC: a `Problem` message in the trailing metadata of a failed call."""

from __future__ import annotations

import grpc

from kvferry.errors import Conflict, Deadline, KvferryError, PeerFailed, Unavailable
from kvferry.v1 import layout_pb2
from kvferry.wire import problem_from_proto

PROTOCOL_MIN, PROTOCOL_MAX = 5, 5
"""Versions of proto/kvferry this build speaks. A pair uses the highest both know; docs/protocol.md tells the rules."""

PROBLEM_KEY = "kvferry-problem-bin"
MAX_MESSAGE = 64 << 20
"""Bytes of one message. A manifest of 65,536 components is 12 MB."""

MAX_PEER_MESSAGE = 16 << 20
"""The same between daemons: gRPC reads a message on the event loop, 5 ms a MB."""

MESSAGE_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", MAX_MESSAGE)]
"""For a Unix socket: its other end is gone as soon as its process is."""

PEER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_PEER_MESSAGE),
    ("grpc.max_send_message_length", MAX_PEER_MESSAGE),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    # gRPC waits for the longer of the two, and this one is a minute by default.
    ("grpc.http2.ping_timeout_ms", 2_500),
    ("grpc.http2.max_pings_without_data", 0),
    # A server takes pings more often than every 5 minutes for abuse unless it is set, and ends the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
]
"""For the network, both ends. An open stream shows that the other end lives: a silent one is noticed after 4.5 s.

Pings are answered by gRPC's own threads, however long Python is busy."""

UNREACHABLE, SILENT = "unreachable", "deadline"
"""Codes of a call whose other side is not there, or did not answer in time."""
ENDED = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})
"""The statuses, beside UNAVAILABLE, that gRPC itself gives a call which the other side has ended or dropped. A daemon
that refuses a call sends a problem with it."""
_MEANINGS: dict[grpc.StatusCode, tuple[type[KvferryError], str, str, str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        Unavailable, UNREACHABLE, "does not answer", "check that the daemon runs and that the address is right",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (Deadline, SILENT, "did not answer in time", "see the daemon's log"),
    **dict.fromkeys(ENDED, (Unavailable, UNREACHABLE, "ended the call", "see whether the daemon was stopped")),
    grpc.StatusCode.UNIMPLEMENTED: (
        Conflict, "protocol", "does not speak this protocol", "check that it is a kvferry peer port, and its version",
    ),
}  # fmt: skip


def error_of(error: grpc.aio.AioRpcError, whom: str, ended: KvferryError | None = None) -> KvferryError:
    """The KvferryError that the other side meant, or one that says why `whom` could not be asked.

    ended: the error to return for a call that the other side has ended without saying why.
    """
    for key, value in error.trailing_metadata() or ():
        if key == PROBLEM_KEY and isinstance(value, bytes):
            return problem_from_proto(layout_pb2.Problem.FromString(value))
    status = error.code()
    if ended is not None and status in ENDED:
        return ended
    failed = PeerFailed, "rpc_failed", f"answered {status.name}", "see the daemon's log"
    raised, code, what, remedy = _MEANINGS.get(status, failed)
    return raised(code, f"{whom} {what}: {error.details()}", field="address", value=whom, remedy=remedy)
