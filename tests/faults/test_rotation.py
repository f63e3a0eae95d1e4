"""Secrets, certificates, authorities and tokens are changed under load, without a failed transfer; and who is left
behind is cut off, on both sides, also in connections that stand."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from authority import DAY, NOW, Authority, replace
from fleet import TIMEOUT_S, ByHand, Daemons, refusal, under_way, until
from lives import TP1, engine_on, published, reads_from
from pair import is_in
from ranks import Shape, TestEngine
from test_peer_secret import answer_to, prewarm

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody, SourceBody, TransferState
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.demo.fleet import DaemonService
from kvferryd.peers.secret import NAME, PeerSecret

pytestmark = pytest.mark.anyio
HERE = "127.0.0.1"
Step = Callable[[], None]


def lines_of(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


class Secret:
    """Every daemon's own file of the secret."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._now = folder, secrets.token_hex(32)
        self._files: list[Path] = []

    def flags(self) -> Sequence[str]:
        file = self._folder / f"secret-{len(self._files)}"
        replace(file, lines_of(self._now))
        self._files.append(file)
        return ("--peer-secret-file", str(file))

    def steps(self) -> Iterator[Step]:
        """Steps of one rotation: for each, what is done at one daemon after another."""
        before, self._now = self._now, secrets.token_hex(32)
        for lines in ((self._now, before), (self._now,)):
            yield from (lambda file=file, lines=lines: replace(file, lines_of(*lines)) for file in self._files)


class Certified:
    """Every daemon's own certificate, key and authorities."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._now = folder, Authority("authority 0")
        self._count = itertools.count(1)
        self._daemons: list[dict[str, Path]] = []

    def flags(self) -> Sequence[str]:
        number = len(self._daemons)
        files = {kind: self._folder / f"{kind}-{number}.pem" for kind in ("cert", "key", "ca")}
        self._daemons.append(files)
        self._write(files, self._now, self._now.certificate)
        return [part for kind, file in files.items() for part in (f"--tls-{kind}", str(file))]

    def _write(self, files: dict[str, Path], authority: Authority, trusted: bytes) -> None:
        cert, key = authority.issue(HERE, "localhost")
        for kind, content in {"ca": trusted, "key": key, "cert": cert}.items():
            replace(files[kind], content)

    def steps(self) -> Iterator[Step]:
        before, self._now = self._now, Authority(f"authority {next(self._count)}")
        both = before.certificate + self._now.certificate
        for issuer, trusted in ((before, both), (self._now, both), (self._now, self._now.certificate)):
            for files in self._daemons:
                yield lambda files=files, of=(issuer, trusted): self._write(files, *of)


def checks(daemon: DaemonService) -> int:
    return daemon.log.read_text().count("what callers have proven was checked again")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Secret, Certified])
@pytest.mark.timeout(300)
async def test_what_daemons_prove_is_changed_without_a_failed_transfer(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path, kind: type[Secret | Certified]
) -> None:
    """A source, and a reader of two ranks: streams of leases, the roster, orders from rank to rank, handshakes. The
    connections stand throughout: nothing is forgotten between transfers."""
    proof, name = kind(tmp_path), kind.__name__.lower()
    (there,) = await daemons.start(f"{name}-s", 1, *proof.flags())
    first = (await daemons.start(f"{name}-r0", 1, *proof.flags()))[0]
    second = await daemons.start_rank(f"{name}-r1", first, *proof.flags())
    source = await TestEngine.start(f"{name}-s", [there], TP1)
    stack.push_async_callback(source.close)
    reader = await TestEngine.start(f"{name}-r", [first, second], Shape.tp(2, num_blocks=16))
    stack.push_async_callback(reader.close)
    router = await stack.enter_async_context(RouterClient(first.url))
    done, enough = 0, asyncio.Event()

    async def traffic() -> None:
        nonlocal done
        numbers = itertools.count()
        while not enough.is_set():
            number = next(numbers)
            kv, _ = await published(source, f"r{number}")
            receiving = asyncio.create_task(reader.gets(f"r{number}", kv))
            await router.order(OrderBody(request_id=f"r{number}", source=source.source()))  # rank 0 hands it on
            await receiving
            done += 1

    def handshakes() -> int:
        return there.log.read_text().count('"event": "handshake"')

    async with under_way(traffic()) as running:

        async def moved(wanted: int) -> bool:
            assert not running.done(), running.exception()
            return done >= wanted

        async def shaken(before: int) -> bool:
            """Whether both ranks of the reader have come along."""
            assert not running.done(), running.exception()
            return handshakes() > before + 1

        await until(lambda: moved(3), "transfers go on")
        for _ in range(2):
            steps = list(proof.steps())
            for phase in range(0, len(steps), 3):
                before = handshakes()
                for step in steps[phase : phase + 3]:
                    step()
                    now = done
                    await until(lambda now=now: moved(now + 1), "transfers go on")
                await until(lambda before=before: shaken(before), "the reader's ranks shake hands anew")
        seen = checks(there)

        async def checked() -> bool:
            assert not running.done(), running.exception()
            return checks(there) > seen or checks(there) >= 2

        await until(checked, "what stands is checked")
        now = done
        await until(lambda: moved(now + 5), "transfers go on")
        enough.set()
        await running


AT_ONCE = 8
"""Orders under way at a time."""


class Routers:
    """Routers of both daemons, with a client for every token: `token` is the one that orders are sent with from now
    on."""

    def __init__(self, stack: AsyncExitStack, urls: Sequence[str], token: str) -> None:
        self._stack, self._urls = stack, urls
        self._of: dict[str, list[RouterClient]] = {}
        self.token = token
        self.done: Counter[str] = Counter()
        """Orders, by their token."""

    async def now(self) -> list[RouterClient]:
        if self.token not in self._of:
            made = [RouterClient(url, token=self.token) for url in self._urls]
            self._of[self.token] = [await self._stack.enter_async_context(each) for each in made]
        return self._of[self.token]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_tokens_are_changed_under_a_stream_of_orders_and_none_fails(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """Tokens of both daemons: the reader's takes orders and tells of them, the source's tells of its leases. Twice the
    new token is let in beside the old one, routers change, and the old one goes."""
    files = [tmp_path / "tokens-s", tmp_path / "tokens-r"]
    old = secrets.token_hex(16)
    for file in files:
        replace(file, lines_of(old))
    (there,), (here,) = [await daemons.start(file.name, 1, "--token-file", str(file)) for file in files]
    shape = Shape.tp(1, num_blocks=256)
    source, reader = [await TestEngine.start(each.name, [each], shape) for each in (there, here)]
    stack.push_async_callback(source.close)
    stack.push_async_callback(reader.close)
    routers, numbers, enough = Routers(stack, [there.url, here.url], old), itertools.count(), asyncio.Event()

    async def orders() -> None:
        while not enough.is_set():
            name = f"r{next(numbers)}"
            token, (at_source, at_reader) = routers.token, await routers.now()
            kv, (lease,) = await published(source, name)
            blocks = reader.take(kv.tokens)
            assert name in {each.request_id for each in await at_source.leases()}
            receiving = asyncio.create_task(reader.receive(name, blocks))
            ordered = await at_reader.order(OrderBody(request_id=name, source=source.source()))
            record = await at_reader.wait(ordered.transfer_id, timeout_s=TIMEOUT_S)
            await receiving
            assert record.state is TransferState.DONE
            assert not shape.wrong(0, reader.ranks[0].memory, kv, blocks)
            await lease.ended()
            routers.done[token] += 1

    async with AsyncExitStack() as streaming:
        streams = [await streaming.enter_async_context(under_way(orders())) for _ in range(AT_ONCE)]

        async def moved(token: str, wanted: int) -> bool:
            for stream in streams:
                assert not stream.done(), stream.exception()
            return routers.done[token] >= wanted

        await until(lambda: moved(old, 2 * AT_ONCE), "orders go on")
        for _ in range(2):
            new = secrets.token_hex(16)
            for file in files:
                replace(file, lines_of(new, old))
                now = routers.done[old]
                await until(lambda now=now, old=old: moved(old, now + AT_ONCE), "the old token goes on")
            routers.token = new
            await until(lambda new=new: moved(new, 2 * AT_ONCE), "all have changed, and the new token is let in")
            for file in files:
                replace(file, lines_of(new))
                now = routers.done[new]
                await until(lambda now=now, new=new: moved(new, now + AT_ONCE), "the new token goes on")
            for daemon in (there, here):
                async with httpx.AsyncClient(base_url=daemon.url, trust_env=False) as http:
                    for headers in ({}, {"authorization": f"Bearer {old}"}, {"authorization": f"Basic {new}"}):
                        refused = await http.post("/v1/transfers", json={}, headers=headers)
                        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
            old = new
        enough.set()
        await asyncio.gather(*streams)


@pytest.mark.slow
async def test_who_is_left_with_an_old_secret_is_cut_off_in_connections_that_stand(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """As a caller and as one that is called; those whose proof holds go on."""
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    names = ("kept-s", "kept-r", "behind")
    files = {name: tmp_path / name for name in names}
    for file in files.values():
        replace(file, lines_of(old))
    started = {name: (await daemons.start(name, 1, "--peer-secret-file", str(file)))[0] for name, file in files.items()}
    source, _ = await engine_on(stack, "kept-s", started["kept-s"])
    behind, _ = await engine_on(stack, "behind", started["behind"])
    reader, router = await engine_on(stack, "kept-r", started["kept-r"])
    for number, each in enumerate((source, behind)):
        await reads_from(reader, each, f"first-{number}")
    kv, blocks = behind.filled(50)
    await behind.publish("long", blocks, 20, more=True)
    reading = asyncio.create_task(reader.gets("long", kv, source=behind.source()))
    await until(lambda: is_in(router, "long", TransferState.READING), "it is read")
    credentials = PeerSecret(files["behind"]).current().for_dialling()
    options = [("grpc.ssl_target_name_override", NAME)]
    channel = await stack.enter_async_context(
        grpc.aio.secure_channel(started["kept-s"].peer, credentials, options=options)
    )
    stale = peer_pb2_grpc.PeerStub(channel)
    opening = peer_pb2.ReadOpening(
        engine_id="kept-s", epoch=source.epoch, reader=peer_pb2.Reader(engine_id="stale", epoch="1", world_size=1)
    )
    caller = ByHand(stale, opening)
    assert (await caller.open("first-0")).HasField("problem")
    for lines in ((new, old), (new,)):
        for name in ("kept-s", "kept-r"):
            replace(files[name], lines_of(*lines))
        shaken = started["kept-s"].log.read_text().count('"event": "handshake"')

        async def again(shaken: int = shaken) -> bool:
            return started["kept-s"].log.read_text().count('"event": "handshake"') > shaken

        await until(again, "the two shake hands anew")
    async with asyncio.timeout(TIMEOUT_S):
        assert (await refusal(caller.call.read())).code == "proof_over"
    assert (await refusal(stale.Handshake(peer_pb2.HandshakeRequest()))).code == "proof_over", "nor a new call"
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(reading, TIMEOUT_S)
    assert await prewarm(router, behind.source()) == "proof_failed"
    await reads_from(reader, source, "after")


CALLERS = {
    "none": (None, "UNAVAILABLE"),
    "of another authority": ("other", "UNAVAILABLE"),
    "run out": ("expired", "UNAVAILABLE"),
    "of ours": ("ours", "let in"),
}


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority("ours")


@pytest.fixture(scope="module")
async def certified(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> DaemonService:
    (cert, key), folder = ours.issue(HERE), tmp_path_factory.mktemp("certified")
    files = {kind: folder / kind for kind in ("cert", "key", "ca")}
    for kind, content in {"cert": cert, "key": key, "ca": ours.certificate}.items():
        replace(files[kind], content)
    flags = [part for kind, file in files.items() for part in (f"--tls-{kind}", str(file))]
    return (await daemons.start("certified", 1, *flags))[0]


@pytest.mark.parametrize(("shown", "answer"), CALLERS.values(), ids=CALLERS.keys())
async def test_a_caller_is_let_in_by_its_certificate(
    certified: DaemonService, ours: Authority, shown: str | None, answer: str
) -> None:
    pairs = {
        "other": Authority("other").issue(HERE), "expired": ours.issue(HERE, until=NOW - DAY), "ours": ours.issue(HERE),
    }  # fmt: skip
    cert, key = pairs[shown] if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(ours.certificate, key, cert)
    async with grpc.aio.secure_channel(certified.peer, credentials) as channel:
        assert await answer_to(peer_pb2_grpc.PeerStub(channel)) == answer


SERVERS = {
    "of another authority": ("other", (HERE,), "proof_failed"),
    "run out": ("expired", (HERE,), "proof_failed"),
    "for another name": ("ours", ("elsewhere.example",), "proof_failed"),
    "for another address": ("ours", ("127.0.0.9",), "proof_failed"),
    "right": ("ours", (HERE,), "malformed_manifest"),  # let in: what it answers there is nonsense
}


@pytest.mark.parametrize(("of", "names", "answer"), SERVERS.values(), ids=SERVERS.keys())
async def test_a_daemon_that_is_dialled_proves_that_it_is_at_home_there(
    certified: DaemonService, ours: Authority, stack: AsyncExitStack, of: str, names: tuple[str, ...], answer: str
) -> None:
    issuer = Authority("other") if of == "other" else ours
    cert, key = issuer.issue(*names, until=NOW - DAY if of == "expired" else NOW + DAY)
    _, router = await engine_on(stack, f"{of}-{names[0]}", certified)
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(Nobody(), server)
    port = server.add_secure_port(f"{HERE}:0", grpc.ssl_server_credentials([(key, cert)]))
    await server.start()
    try:
        assert await prewarm(router, SourceBody(engine_id="nobody", address=f"{HERE}:{port}")) == answer
    finally:
        await server.stop(0)


class Nobody(peer_pb2_grpc.PeerServicer):
    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: object) -> peer_pb2.HandshakeReply:
        return peer_pb2.HandshakeReply()
