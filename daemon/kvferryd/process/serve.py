"""The daemon process: start everything in order, stop it in the other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry import __version__
from kvferry.descriptors import raise_limit
from kvferry.errors import KvferryError
from kvferry.memory import cuda
from kvferry.memory.handover import SUFFIX
from kvferry.rpc import MESSAGE_OPTIONS, PEER_OPTIONS
from kvferry.v1 import engine_pb2_grpc, peer_pb2_grpc
from kvferryd.aio import running
from kvferryd.api.answer import Context, Undecoded
from kvferryd.api.callers import MAX_CALLS, Callers
from kvferryd.api.engine import EngineService
from kvferryd.api.node import NodeSocket
from kvferryd.api.peer import PeerService
from kvferryd.api.rest.server import RestServer
from kvferryd.config import Config, bad_config
from kvferryd.copy.cuda import load
from kvferryd.ferry import Ferry
from kvferryd.memory.kept import Keeper
from kvferryd.observe import logs
from kvferryd.observe.history import History, opened
from kvferryd.observe.metrics import Metrics, total
from kvferryd.process import heap
from kvferryd.transport import nixl, ucx

log = logs.get(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 0.5
ENDS_S = 2.0
"""How long threads may take to end when all is closed. Python waits for them for ever, and a disk, a driver or a
resolver may not answer."""
SWITCH_S = 2e-4
"""How long a thread may hold the interpreter while another waits. NIXL's thread has microseconds of work, and Python's
5 ms would be longer than most transfers."""
HANDSHAKE_MS = 5000
"""The longest that a peer may take to prove itself."""


def run(config: Config, keeper_fd: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT: then drain, at most drain_timeout_s, and stop. A second signal stops at once.

    keeper_fd: the keeper's end of this process. The keeper decides when it is its turn.
    """
    keeper = None if keeper_fd is None else Keeper(keeper_fd)
    sys.setswitchinterval(SWITCH_S)
    heap.keep()
    raise_limit()  # an engine takes 30, a peer two or more
    if config.device != "cpu":
        log.info("loading torch and Triton: some seconds")
        with contextlib.suppress(KvferryError):  # engines get a note when they register, and read directly
            load()
            if config.way != "direct":  # then UCX opens and closes what it reads for every run, which is slow even so
                nixl.keep_no_mappings()
    listening = ucx.set_up(config)
    nixl.load()  # an engine would miss it only when it registers
    # A full collection walks through every object of every module and stops the process meanwhile: 113 ms with torch
    # imported. So what is alive now is taken out of later ones; what of it dies in a cycle stays.
    gc.collect()
    gc.freeze()
    gc.enable()
    before = ""
    if keeper is not None:
        try:
            before = keeper.turn(config.log_format, config.drain_timeout_s)
        except EOFError:
            return 0
        if before:
            log.warning("serving in place of another daemon", because=before)
    for warning in config.warnings():
        log.warning(warning)
    history = opened(config.state, keeper.history if keeper else None, before)
    return asyncio.run(_serve(config, keeper, history, listening))


async def _serve(config: Config, keeper: Keeper | None, history: History, listening: Mapping[str, str]) -> int:
    stopping, now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (now if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:  # not loop.add_signal_handler: the loop puts the default, death, back when it closes
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(signalled))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(_ignore_signals)  # a late signal must not kill a process that stops cleanly
        metrics = Metrics()
        ferry = Ferry(config, metrics, keeper, history)
        await stack.enter_async_context(_peer_server(ferry))
        await stack.enter_async_context(_engine_server(ferry))
        stack.push_async_callback(ferry.close)  # before the servers: it ends their streams
        rest = RestServer(ferry)
        try:
            await rest.listen()
        except OSError:
            raise _cannot_listen("rest", config.rest) from None
        beside = ferry.known_peers.run(), heap.give_back(lambda: (total(metrics.ended), total(metrics.leases_ended)))
        await stack.enter_async_context(running(beside))
        serving, stopped = await stack.enter_async_context(running([rest.serve(), _told(stopping)]))
        stack.push_async_callback(_stop_rest, rest, serving)
        if keeper is not None:
            keeper.serving()  # before anybody else can read it
        log.info(
            "serving", version=__version__, rest=config.rest, peer=config.peer, advertise=config.advertise,
            engine_socket=str(config.engine_socket), device=config.device, pid=os.getpid(),
            peers_prove="a certificate" if config.tls else "the secret" if ferry.proof else "nothing: loopback only",
            ucx_listens=listening or "not over TCP",
        )  # fmt: skip
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        await _drain(ferry, now)
    log.info("stopped")
    ending = threading.Timer(ENDS_S, os._exit, [0])
    ending.daemon = True
    ending.start()
    return 0


async def _told(event: asyncio.Event) -> None:
    await event.wait()


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


async def _drain(ferry: Ferry, now: asyncio.Event) -> None:
    log.info("stopping", drain_timeout_s=ferry.config.drain_timeout_s)
    drain = ferry.drain(ferry.config.drain_timeout_s, "a signal to stop", stopping=True)
    async with running([drain, _told(now)]) as either:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    status = ferry.drain_status()
    if not status.drained:
        log.warning("not drained", leases=status.leases, transfers=status.transfers)
    ferry.closing.set()


async def _stop_rest(rest: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    rest.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _cannot_listen(field: str, address: str) -> KvferryError:
    remedy = "another process has the port, or the address is not this host's"
    return bad_config(field, address, f"nothing can listen on {address}", remedy)


@contextlib.asynccontextmanager
async def _peer_server(ferry: Ferry) -> AsyncIterator[None]:
    config = ferry.config
    options = [*PEER_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS)]
    server = grpc.aio.server(interceptors=[Undecoded()], options=options, maximum_concurrent_rpcs=2 * MAX_CALLS)
    callers = Callers(config.allow_peers, ferry.proof)
    node = NodeSocket(ferry.node, cuda.device(config.device).uuid) if ferry.node is not None else None
    peer_pb2_grpc.add_PeerServicer_to_server(PeerService(ferry, callers, node), server)
    await _describe(server, "kvferry.v1.Peer", reflected=bool(ferry.proof))
    address = re.sub(r"^\*:", "[::]:", config.peer)  # gRPC's word for every interface, of IPv4 as well
    try:
        if ferry.proof:
            server.add_secure_port(address, ferry.proof.server_credentials())
        else:
            server.add_insecure_port(address)
    except RuntimeError:
        raise _cannot_listen("peer", config.peer) from None
    async with contextlib.AsyncExitStack() as stack:
        if node is not None:
            await stack.enter_async_context(node.serving())
        await server.start()
        stack.push_async_callback(server.stop, GRACE_S)
        await stack.enter_async_context(
            running([ferry.follow_proof(ferry.proof, callers.recheck)] if ferry.proof else [])
        )
        yield


@contextlib.asynccontextmanager
async def _engine_server(ferry: Ferry) -> AsyncIterator[None]:
    path = ferry.config.engine_socket
    handing = path.with_name(f"{path.name}{SUFFIX}")
    _claim(path)
    _claim(handing)
    server = grpc.aio.server(interceptors=[Undecoded()], options=MESSAGE_OPTIONS)
    service = EngineService(ferry)
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    await _describe(server, "kvferry.v1.Engine", reflected=True)
    before = os.umask(0o177)  # the socket is made with mode 0600, never wider
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(before)
    await server.start()
    try:
        async with service.handovers.serving(handing):
            yield
    finally:
        await server.stop(GRACE_S)
        path.unlink(missing_ok=True)


class _Health(health.aio.HealthServicer):
    """Without Watch: a stream that never says anything new takes a place of gRPC's for as long as its caller likes."""

    async def Watch(self, request: object, context: Context) -> None:  # noqa: N802  gRPC names it
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing changes while the process lives: call Check")


async def _describe(server: grpc.aio.Server, service: str, *, reflected: bool) -> None:
    """Add what grpcurl and probes ask for: health, which says that the process answers, as /healthz does, and
    reflection: the protos, and no data. Callers without proof get neither."""
    answering = _Health()
    await answering.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(answering, server)
    if reflected:
        reflection.enable_server_reflection([service, health.SERVICE_NAME, reflection.SERVICE_NAME], server)


def _claim(path: Path) -> None:
    """Remove a socket that a killed daemon left. Raises KvferryError when anything else is there."""

    def refused(why: str, remedy: str) -> KvferryError:
        return bad_config("engine_socket", path, why, remedy)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"the folder of engine_socket cannot be made: {error.strerror}"
        raise refused(why, "name a socket in a folder this user may write to") from None
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise refused("what is at engine_socket is no socket", "name a path where nothing is")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
            why = "another daemon serves this engine socket"
        except (ConnectionRefusedError, FileNotFoundError):  # only these mean that nobody listens
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            why = f"the socket at engine_socket may be in use: {error.strerror or error}"
    raise refused(why, "one daemon per GPU, each with its own engine_socket")
