"""Messages that no client of ours sends, to every method of both gRPC services: each is answered, and harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import grpc
import pytest
from fleet import SPOKEN, TIMEOUT_S, Joining, serving
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from hostile import Hostile
from raw import LONG_S, REQUESTS, RawEngine, attaching, blocks, commands, joining, raw_engine, streamed, unary
from target import Target

from kvferry.memory.handover import framed, open_pipe
from kvferry.schemas import DestinationBody, OrderBody, Ordered
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import manifest_to_proto, tables_to_proto
from kvferryd.staging.share import packs, share_of, wanting

pytestmark = pytest.mark.anyio
SHORT, LONG = 60, 700
"""Cases for each method; a stream is one case and has up to ten messages."""
counts = pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
AT_ONCE = 6
EACH = 15
"""Cases behind each good call of one session."""
STREAMS = ("Join", "Map", "Order")
T = TypeVar("T")
ALLOCATED = [0, 1, 4096, 65536, 1 << 45, (1 << 63) - 1, (1 << 64) - 1]
"""Bytes: nothing between, which anybody may have and which takes time."""
CHUNK = 1 << 20
KEYS = [f"k{n}" for n in range(4)]


@asynccontextmanager
async def doors(target: Target) -> AsyncIterator[tuple[grpc.Channel, grpc.Channel]]:
    """The engine's and the peers'."""
    with (
        grpc.insecure_channel(f"unix:{target.daemon.socket}") as engine,
        grpc.insecure_channel(target.daemon.peer) as peer,
    ):
        yield engine, peer


def hostile(rng: random.Random, target: Target, raw: RawEngine, *addresses: str) -> Hostile:
    known = {
        "engine_id": [target.engine.engine_id, raw.engine_id, target.friend.engine_id, "nobody"],
        "epoch": [target.engine.epoch, raw.epoch, target.friend.epoch, "old"],
        "session": [raw.session, "none"],
        "request_id": [*REQUESTS, *(f"own-{each}" for each in REQUESTS)],
        "address": [*target.forbidden.addresses, target.silent, target.friend.address, target.daemon.peer, *addresses],
        "rank": [0, 1, 2],
        "world_size": [1, 2, 3],
        **{field: [version] for field, version in SPOKEN.items()},
        "key": [raw.key],
        "groups": ["full", "state", "none"],
        "tables": ["full", "state", "none"],
        "block_ids": [0, 1, 2, 3, 31, 32],
        "reading": [0, 1, 2, 3],
        "packing": [0, 1, 2],
        "want": [0, 1, 2],
        "read": [0, 1, 2],
        "attempt": [0, 1, 2],
        "number": [0, 1, 2],
        "by": ["", "another"],
        "lease": [0, 1, 2],
        "idempotency_key": ["", *KEYS],
        "resume": [raw.session],
        "leader": [raw.attached.instance, "played"],
        "challenge": [bytes(32)],
        "way": ["auto", "direct", "staged", "mapped"],
    }
    making = Hostile(rng, known, {"nbytes": ALLOCATED})
    making.learn(raw.attached)
    return making


async def all_judged(target: Target, cases: Sequence[tuple[Callable[[], T], object]]) -> list[T]:
    """The answers, some at a time. A case is a call, and what is said in it."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], T], what: object) -> T | None:
        async with gate:
            return await target.judge(asyncio.to_thread(call), what)

    return [answer for answer in await asyncio.gather(*(one(*case) for case in cases)) if answer is not None]


@dataclass(frozen=True)
class Step:
    """A call that is good at its place among others. good: what is said in it, made anew each time."""

    service: str
    name: str
    good: Callable[[], Message]
    reply: type[Message]
    garble: Callable[[Message], None] = lambda said: None
    """Changes what is no field of the message."""

    def call(self, door: grpc.Channel, said: Message) -> list[Message]:
        """The first answer. Blocks; raises grpc.RpcError."""
        if self.name in STREAMS:
            answers = streamed(door, self.service, self.name, self.reply, [said], 1)
        else:
            answers = [unary(door, self.service, self.name, self.reply, said)]
        if isinstance(said, peer_pb2.RecordRequest) and isinstance(answers[0], peer_pb2.RecordReply):
            assert json.loads(answers[0].record)["engine_id"] == said.engine_id, f"another engine's, for {said}"
        return answers


async def attack(target: Target, making: Hostile, door: grpc.Channel, steps: Sequence[Step], count: int) -> None:
    """Each call in its order. Behind each, so many that are nearly one of those that have come or of the next: they
    name what the answers have named."""
    kinds: set[type[Message]] = set()
    for at, step in enumerate(steps):
        good = await asyncio.to_thread(step.good)
        kinds.add(type(good))
        cases = [(partial(step.call, door, good), good)]
        for answers in await all_judged(target, cases):
            for answer in answers:
                making.learn(answer)
        cases = []
        for _ in range(count):
            near = making.rng.choice(steps[: at + 2])
            good = await asyncio.to_thread(near.good)
            said = making.message(type(good), good)
            near.garble(said)
            cases.append((partial(near.call, door, said), said))
        await all_judged(target, cases)
    assert not (unmet := making.unmet(*kinds)), f"nothing of these names was there: {unmet}"


@counts
@pytest.mark.parametrize("piped", [False, True])
async def test_commands_of_an_engine(attacked: Target, rng: random.Random, count: int, piped: bool) -> None:
    async with raw_engine(attacked, piped=piped) as raw:
        making, well = hostile(rng, attacked, raw), commands(attacked)
        for good in islice(well, 2):  # chance alone may change each of them
            await raw.say(good)
        await raw.some_moved()
        for good in islice(well, count * 3):
            await raw.say(making.message(engine_pb2.Command, good))
        await raw.say(engine_pb2.Command(id=1, weights=engine_pb2.WeightsRequest()))  # chance may have replaced them
        for good in islice(well, 2):
            await raw.say(good)
        await raw.all_answered()
    assert attacked.said["ok"], attacked.said


@counts
async def test_sessions_of_engines(attacked: Target, rng: random.Random, count: int) -> None:
    async with raw_engine(attacked) as raw, doors(attacked) as (door, _):
        making = hostile(rng, attacked, raw)
        cases = []
        for n in range(count):
            good = islice(commands(attacked), rng.randrange(6))
            opening = engine_pb2.Command(attach=attaching(f"fuzzed-{n % 16}", f"{raw.epoch}-{n}", 1))
            said = [making.message(engine_pb2.Command, opening) if rng.random() < 0.5 else opening]
            said += [making.message(engine_pb2.Command, each) for each in good]
            cases.append((partial(heard, attacked, door, said), said))
        await all_judged(attacked, cases)


def heard(target: Target, door: grpc.Channel, said: list[engine_pb2.Command]) -> None:
    for event in streamed(door, "Engine", "Attach", engine_pb2.Event, said, len(said)):
        assert isinstance(event, engine_pb2.Event)
        if event.answer.HasField("problem"):
            target.judge_problem(event.answer.problem, said)


@counts
async def test_bytes_of_a_pipe(attacked: Target, rng: random.Random, count: int) -> None:
    """Each session ends by name, or goes on; others are not harmed."""
    async with doors(attacked) as (door, _):
        cases = [(partial(piped, attacked, door, frames := hostile_frames(rng), n), frames) for n in range(count)]
        await all_judged(attacked, cases)


def hostile_frames(rng: random.Random) -> list[bytes]:
    """Good commands and other bytes, with lengths that lie, cut anywhere."""
    probe = framed(engine_pb2.Command(id=1, probe=engine_pb2.Probe()))
    kinds = [
        lambda: probe,
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: rng.randrange(1 << 32).to_bytes(4, "big") + rng.randbytes(rng.randrange(64)),
        lambda: rng.randrange(64).to_bytes(4, "big") + rng.randbytes(rng.randrange(64)),
        lambda: probe[: rng.randrange(len(probe))],
        lambda: probe * rng.randrange(300),
    ]
    return [rng.choice(kinds)() for _ in range(rng.randrange(1, 8))]


def piped(target: Target, door: grpc.Channel, frames: list[bytes], number: int) -> None:
    """All this by the pipe of a session, and the end of the pipe or of the engine's patience. Blocks; raises
    grpc.RpcError."""
    attach = engine_pb2.Command(attach=attaching(f"piped-{number % 16}", f"{number}", 1))
    call = door.stream_stream(
        "/kvferry.v1.Engine/Attach", engine_pb2.Command.SerializeToString, engine_pb2.Event.FromString
    )
    over = threading.Event()

    def said() -> Iterator[engine_pb2.Command]:
        yield attach
        over.wait(TIMEOUT_S)

    replies, session = call(said(), timeout=TIMEOUT_S), ""
    try:
        session = next(replies).attached.session
        connection, process = open_pipe(str(target.daemon.socket), session)
        if process is not None:
            process.close()
        with connection:
            connection.settimeout(TIMEOUT_S)
            with contextlib.suppress(OSError):  # the daemon has closed it
                for frame in frames:
                    connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        for event in replies:
            raise AssertionError(f"by the stream of a session that has a pipe: {event}")
    finally:
        over.set()
        replies.cancel()
        ending = engine_pb2.EndRequest(session=session, leave=True)
        unary(door, "Engine", "End", engine_pb2.EndReply, ending)


@counts
async def test_calls_of_an_engine(attacked: Target, rng: random.Random, count: int) -> None:
    async with (
        raw_engine(attacked) as raw,
        doors(attacked) as (door, _),
        grpc.aio.insecure_channel(f"unix:{attacked.daemon.socket}") as channel,
    ):
        for _ in range(0, count, EACH):  # each with a session that has not registered yet
            fresh = RawEngine(attacked, channel)
            await fresh.attach()
            making = hostile(rng, attacked, raw)
            making.known["session"] = [fresh.session, fresh.session, raw.session, "none"]
            await attack(attacked, making, door, calls_of(fresh), EACH)
            await fresh.leave()


def calls_of(engine: RawEngine) -> list[Step]:
    """From the first to the last of a session."""
    manifest, session = engine.manifest(), engine.session

    def allocate(region: int, key: str) -> Message:
        nbytes = 4096 if region else manifest.regions[0].nbytes
        return engine_pb2.AllocateRequest(session=session, region=region, nbytes=nbytes, idempotency_key=key)

    def adopt() -> Message:
        memory = engine_pb2.Memory(region=2, nbytes=4096, handed=engine_pb2.HandedFile(ticket=engine.ticket()))
        return engine_pb2.AdoptRequest(session=session, memory=memory, idempotency_key=KEYS[2])

    return [
        Step("Engine", "Allocate", partial(allocate, 0, KEYS[0]), engine_pb2.Memory),
        Step("Engine", "Allocate", partial(allocate, 1, KEYS[1]), engine_pb2.Memory),
        Step("Engine", "Adopt", adopt, engine_pb2.Memory),
        Step(
            "Engine", "OpenFences",
            lambda: engine_pb2.OpenFencesRequest(session=session, ticket=engine.ticket()), engine_pb2.OpenFencesReply,
        ),
        Step(
            "Engine", "Register",
            lambda: engine_pb2.RegisterRequest(session=session, manifest=manifest, idempotency_key=KEYS[3]),
            engine_pb2.RegisterReply,
        ),
        Step("Engine", "End", lambda: engine_pb2.EndRequest(session=session, leave=True), engine_pb2.EndReply),
    ]  # fmt: skip


@counts
async def test_calls_of_a_peer(attacked: Target, rng: random.Random, count: int) -> None:
    async with (
        raw_engine(attacked, 2) as raw,
        doors(attacked) as (_, door),
        serving(Joining()) as address,
        lent(attacked, door) as (_, wanted),
    ):
        making = hostile(rng, attacked, raw, address)
        source = engine_pb2.Source(engine_id=attacked.friend.engine_id, address=attacked.friend.address)
        own = manifest_to_proto(attacked.engine.ranks[0].manifest)
        other = manifest_to_proto(attacked.friend.ranks[0].manifest)
        of_target = {"engine_id": attacked.engine.engine_id, "epoch": attacked.engine.epoch}
        of_raw = {"engine_id": raw.engine_id, "key": raw.key}
        member = peer_pb2.Member(rank=1, address=address, epoch=raw.epoch, instance="played")
        ids = [f"{each} of {raw.epoch}" for each in ("one", "another")]
        order = OrderBody(
            request_id="ordered", source=attacked.friend.source(), attempt=1, order_id=ids[0],
            destination=DestinationBody(engine_id=raw.engine_id),
        )  # fmt: skip
        led = peer_pb2.LeadRequest(**of_raw, order=order.model_dump_json().encode())
        foreign = DestinationBody(engine_id=attacked.engine.engine_id)
        ordered = [
            Ordered.model_validate_json(unary(door, "Peer", "Lead", peer_pb2.LeadReply, led).ordered),
            await attacked.router.order(order.model_copy(update={"destination": foreign, "order_id": ids[1]})),
        ]
        making.known |= {"transfer_id": [each.transfer_id for each in ordered], "order_id": ids}

        def garble(said: Message) -> None:
            if rng.random() < 0.7:  # JSON in a message
                said.order = json.dumps(making.json(order.model_dump(mode="json"))).encode()

        reads = peer_pb2.Reader(engine_id="reader", epoch="1", rank=0, world_size=1)
        good: list[tuple[Message, type[Message]]] = [
            (peer_pb2.HandshakeRequest(**SPOKEN, engine_id=attacked.engine.engine_id), peer_pb2.HandshakeReply),
            (joining(raw.engine_id, member), peer_pb2.Roster),
            (peer_pb2.AdmitRequest(engine_id=raw.engine_id, epoch=raw.epoch, challenge=bytes(32)), peer_pb2.AdmitReply),
            (peer_pb2.MapRequest(**of_target), peer_pb2.MapReply),
            (peer_pb2.PairRequest(**of_target, sources=[own], destination=other), peer_pb2.PairReply),
            (peer_pb2.SumRequest(**of_target, wanted=wanted, wide=True), peer_pb2.SumReply),
            (peer_pb2.ServedRequest(**of_target, request_id="r0", lease=1, reader=reads), peer_pb2.ServedReply),
            (peer_pb2.PrewarmRequest(**of_raw, source=source), peer_pb2.PrewarmReply),
            (led, peer_pb2.LeadReply),
            (peer_pb2.RecordRequest(**of_raw, transfer_id=ordered[0].transfer_id), peer_pb2.RecordReply),
            (
                peer_pb2.OrderRequest(
                    **of_raw, request_id="r0", source=source, leader="played",
                    attempt=peer_pb2.Attempt(number=1, by="another"),
                    tables=tables_to_proto(blocks().tables()), tokens=layout_pb2.TokenRange(stop=20), deadline_s=1,
                ),
                peer_pb2.RankTransfer,
            ),
            (
                peer_pb2.AbortRequest(**of_raw, request_id="r0", attempt=peer_pb2.Attempt(number=1)),
                peer_pb2.AbortReply,
            ),
        ]  # fmt: skip
        steps = []
        for said, reply in good:
            kind = type(said)
            same = partial(kind.FromString, said.SerializeToString())
            step = Step("Peer", kind.__name__.removesuffix("Request"), same, reply)
            steps.append(replace(step, garble=garble) if said is led else step)
        making.bounded["deadline_s"] = [0.001, 0.5, 1.0, -1.0, float("nan"), float("inf")]
        making.bounded["wait_s"] = making.bounded["deadline_s"]
        attacked.loaded += 3  # each engine here may be met
        await attack(attacked, making, door, steps, count)
        await attacked.cleared()


@asynccontextmanager
async def lent(target: Target, door: grpc.Channel) -> AsyncIterator[tuple[peer_pb2.ReadRequest, peer_pb2.PackOpen]]:
    """Leases of the target's, which its peers may read: (how a reader's stream begins, what it wants of own-r0)."""
    own, other = target.engine.ranks[0], target.friend.ranks[0]
    for request_id in REQUESTS:
        await own.client.publish(f"own-{request_id}", blocks().tables(), 20, readers=1 << 20, ttl_s=LONG_S)
    asked_first = peer_pb2.HandshakeRequest(**SPOKEN, engine_id=target.engine.engine_id)
    met = unary(door, "Peer", "Handshake", peer_pb2.HandshakeReply, asked_first)
    opening = peer_pb2.ReadRequest(
        opening=peer_pb2.ReadOpening(
            engine_id=target.engine.engine_id,
            epoch=target.engine.epoch,
            reader=peer_pb2.Reader(engine_id="reader", epoch="1", rank=0, world_size=1),
            agent_name=met.agent_name,
        )
    )
    pairing = peer_pb2.PairRequest(
        engine_id=target.engine.engine_id, epoch=target.engine.epoch,
        sources=[manifest_to_proto(own.manifest)], destination=manifest_to_proto(other.manifest),
    )  # fmt: skip
    named = unary(door, "Peer", "Pair", peer_pb2.PairReply, pairing)
    asked = peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=1, request_id="own-r0"))
    (reply,) = streamed(door, "Peer", "Read", peer_pb2.ReadReply, [opening, asked], 1)
    wanted = wanting(blocks().tables(), (0, 20), states=True, chunk_nbytes=CHUNK)
    chunks = packs(share_of([own.manifest], other.manifest, 0), 0, blocks().tables(), wanted)
    wanted.MergeFrom(
        peer_pb2.PackOpen(
            request_id="own-r0", word=reply.update.word, version=reply.update.version, pairing=named.pairing,
            chunks=len(chunks), nbytes=sum(each.nbytes for each in chunks),
        )
    )  # fmt: skip
    yield opening, wanted
    for request_id in REQUESTS:
        await own.client.abort(f"own-{request_id}")


@counts
async def test_readers(attacked: Target, rng: random.Random, count: int) -> None:
    async with raw_engine(attacked) as raw, doors(attacked) as (_, door), lent(attacked, door) as (opening, wanted):
        pack = peer_pb2.Pack(reading=1, packing=1, open=wanted, want=range(wanted.chunks))
        making = hostile(rng, attacked, raw)
        making.learn(wanted)
        making.known |= {"known_word": [wanted.word], "version": [1], "chunk_nbytes": [CHUNK, 4096, 256]}
        making.known["agent_name"] = [opening.opening.agent_name]
        assert not making.unmet(peer_pb2.ReadRequest)

        def requests() -> Iterator[peer_pb2.ReadRequest]:
            for n in range(rng.randrange(10)):
                good = rng.choice([
                    peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=n + 1, request_id=rng.choice(REQUESTS))),
                    peer_pb2.ReadRequest(pack=pack),
                    peer_pb2.ReadRequest(pack=peer_pb2.Pack(reading=1, packing=1, read=[0], vouch=True)),
                    peer_pb2.ReadRequest(close=peer_pb2.LeaseClose(reading=n, request_id="own-r1", complete=True)),
                ])  # fmt: skip
                yield making.message(peer_pb2.ReadRequest, good) if rng.random() < 0.6 else good

        cases = []
        for _ in range(count):
            first = making.message(peer_pb2.ReadRequest, opening) if rng.random() < 0.2 else opening
            said = [first, *requests()]
            cases.append((partial(read, attacked, door, said), said))
        await all_judged(attacked, cases)


def read(target: Target, door: grpc.Channel, said: list[peer_pb2.ReadRequest]) -> None:
    for reply in streamed(door, "Peer", "Read", peer_pb2.ReadReply, said, 1000):
        assert isinstance(reply, peer_pb2.ReadReply)
        if reply.HasField("problem"):
            target.judge_problem(reply.problem, said)
        elif reply.pack.HasField("problem"):
            target.judge_problem(reply.pack.problem, said)
        elif reply.pack.packed:
            target.said["packed"] += 1


METHODS = [
    *(("Engine", name) for name in ("Attach", "End", "Allocate", "Adopt", "OpenFences", "Register")),
    *(("Peer", method.name) for method in peer_pb2.DESCRIPTOR.services_by_name["Peer"].methods),
]


@counts
async def test_bytes_that_are_no_message(attacked: Target, rng: random.Random, count: int) -> None:
    async with doors(attacked) as (engine, peer):
        making = Hostile(rng)
        own = manifest_to_proto(attacked.engine.ranks[0].manifest)
        good = [
            engine_pb2.Command(attach=attaching("x", "1", 1)).SerializeToString(),
            peer_pb2.PairRequest(engine_id="x", epoch="1", sources=[own], destination=own).SerializeToString(),
            peer_pb2.HandshakeRequest(**SPOKEN, engine_id="target").SerializeToString(),
        ]
        cases = []
        for service, method in METHODS:
            for _ in range(count // 4):
                said = making.garbled(rng.choice(good))
                door = engine if service == "Engine" else peer
                if method in ("Attach", "Read", "Order"):
                    said_all = [said, making.garbled(rng.choice(good))]
                    call = partial(streamed, door, service, method, Empty, said_all, 3)
                else:
                    call = partial(streamed, door, service, method, Empty, [said], 3)
                cases.append((call, (service, method, said)))
        await all_judged(attacked, cases)
