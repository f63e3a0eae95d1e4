"""Messages that no client of ours sends, to every method of both gRPC services: each is answered, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

import grpc
import pytest
from fleet import SPOKEN, Joining, serving
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from hostile import Hostile
from raw import LONG_S, REQUESTS, RawEngine, attaching, blocks, commands, joining, raw_engine, streamed, unary
from target import Target

from kvferry.schemas import DestinationBody, OrderBody
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import manifest_to_proto, tables_to_proto
from kvferryd.staging.share import packs, share_of, wanting

pytestmark = pytest.mark.anyio
SHORT, LONG = 60, 700
"""Cases for each method; a stream is one case and has up to ten messages."""
counts = pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
AT_ONCE = 6
ALLOCATED = [0, 1, 4096, 65536, 1 << 45, (1 << 63) - 1, (1 << 64) - 1]
"""Bytes: nothing between, which anybody may have and which takes time."""
CHUNK = 1 << 20


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
        "idempotency_key": ["", "k0", "k1"],
    }
    return Hostile(rng, known, {"nbytes": ALLOCATED})


async def all_judged(target: Target, cases: Sequence[tuple[Callable[[], object], object]]) -> None:
    """Some at a time. A case is a call, and what is said in it."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], object], what: object) -> None:
        async with gate:
            await target.judge(asyncio.to_thread(call), what)

    await asyncio.gather(*(one(*case) for case in cases))


@counts
async def test_commands_of_an_engine(attacked: Target, rng: random.Random, count: int) -> None:
    async with raw_engine(attacked) as raw:
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
async def test_calls_of_an_engine(attacked: Target, rng: random.Random, count: int) -> None:
    async with (
        raw_engine(attacked) as raw,
        doors(attacked) as (door, _),
        grpc.aio.insecure_channel(f"unix:{attacked.daemon.socket}") as channel,
    ):
        for at in range(0, count, SHORT):  # each with a session that has not registered yet
            fresh = RawEngine(attacked, channel)
            await fresh.attach()
            making = hostile(rng, attacked, raw)
            making.known["session"] = [fresh.session, fresh.session, raw.session, "none"]
            manifest = fresh.manifest()
            region = engine_pb2.AllocateRequest(session=fresh.session, nbytes=manifest.regions[0].nbytes)
            await fresh.stub.Allocate(region)
            handed = engine_pb2.Memory(region=1, nbytes=4096, handed=engine_pb2.HandedFile(ticket="x"))
            good: dict[str, tuple[Message, type[Message]]] = {
                "End": (engine_pb2.EndRequest(session="none"), engine_pb2.EndReply),
                "Allocate": (
                    engine_pb2.AllocateRequest(
                        session=fresh.session, region=1, nbytes=4096, idempotency_key="k0"
                    ),
                    engine_pb2.Memory,
                ),
                "Adopt": (
                    engine_pb2.AdoptRequest(session=fresh.session, memory=handed, idempotency_key="k1"),
                    engine_pb2.Memory,
                ),
                "OpenFences": (
                    engine_pb2.OpenFencesRequest(session=fresh.session, ticket="x"), engine_pb2.OpenFencesReply,
                ),
                "Register": (
                    engine_pb2.RegisterRequest(session=fresh.session, manifest=manifest, idempotency_key="k0"),
                    engine_pb2.RegisterReply,
                ),
            }  # fmt: skip
            cases = []
            for name, (request, reply) in good.items():
                for _ in range(min(SHORT, count - at)):
                    if name == "End":
                        making.known["session"] = ["none"]
                    said = making.message(type(request), request)
                    cases.append((partial(unary, door, "Engine", name, reply, said), said))
                    making.known["session"] = [fresh.session, fresh.session, raw.session, "none"]
            rng.shuffle(cases)
            await all_judged(attacked, cases)
            await fresh.leave()


@counts
async def test_calls_of_a_peer(attacked: Target, rng: random.Random, count: int) -> None:
    async with raw_engine(attacked, 2) as raw, doors(attacked) as (_, door), serving(Joining()) as address:
        making = hostile(rng, attacked, raw, address)
        making.known["way"] = ["auto", "direct", "staged", "mapped"]
        source = engine_pb2.Source(engine_id=attacked.friend.engine_id, address=attacked.friend.address)
        own = manifest_to_proto(attacked.engine.ranks[0].manifest)
        other = manifest_to_proto(attacked.friend.ranks[0].manifest)
        of_target = {"engine_id": attacked.engine.engine_id, "epoch": attacked.engine.epoch}
        member = peer_pb2.Member(rank=1, address=address, epoch=raw.epoch)
        order = OrderBody(
            request_id="r1", source=attacked.friend.source(), deadline_ms=100, attempt=1, order_id="o",
            destination=DestinationBody(engine_id=raw.engine_id),
        )  # fmt: skip
        good: dict[str, tuple[Message, type[Message]]] = {
            "Handshake": (
                peer_pb2.HandshakeRequest(**SPOKEN, engine_id=attacked.engine.engine_id),
                peer_pb2.HandshakeReply,
            ),
            "Admit": (peer_pb2.AdmitRequest(engine_id=raw.engine_id, epoch=raw.epoch), peer_pb2.AdmitReply),
            "Pair": (peer_pb2.PairRequest(**of_target, sources=[own], destination=other), peer_pb2.PairReply),
            "Sum": (
                peer_pb2.SumRequest(
                    **of_target, wanted=wanting(blocks().tables(), (0, 20), states=True, chunk_nbytes=CHUNK)
                ),
                peer_pb2.SumReply,
            ),
            "Abort": (
                peer_pb2.AbortRequest(
                    engine_id=raw.engine_id, request_id="r0", attempt=peer_pb2.Attempt(number=1), key=raw.key
                ),
                peer_pb2.AbortReply,
            ),
            "Lead": (
                peer_pb2.LeadRequest(engine_id=raw.engine_id, order=order.model_dump_json().encode(), key=raw.key),
                peer_pb2.LeadReply,
            ),
            "Record": (
                peer_pb2.RecordRequest(engine_id=raw.engine_id, transfer_id="x", key=raw.key), peer_pb2.RecordReply,
            ),
            "Join": (joining(raw.engine_id, member), peer_pb2.Roster),
            "Map": (peer_pb2.MapRequest(**of_target), peer_pb2.MapReply),
            "Order": (
                peer_pb2.OrderRequest(
                    engine_id=raw.engine_id, request_id="r0", source=source, key=raw.key,
                    attempt=peer_pb2.Attempt(number=1, by="another"),
                    tables=tables_to_proto(blocks().tables()), tokens=layout_pb2.TokenRange(stop=20), deadline_s=1,
                ),
                peer_pb2.RankTransfer,
            ),
        }  # fmt: skip
        making.bounded["deadline_s"] = [0.001, 0.5, 1.0, -1.0, float("nan"), float("inf")]
        making.bounded["wait_s"] = making.bounded["deadline_s"]
        cases = []
        for name, (request, reply) in good.items():
            for _ in range(count):
                said = making.message(type(request), request)
                if name in ("Join", "Map", "Order"):
                    call = partial(streamed, door, "Peer", name, reply, [said], 1)
                elif name == "Lead":  # JSON in a message
                    if rng.random() < 0.7:
                        said.order = json.dumps(making.json(order.model_dump(mode="json"))).encode()
                    call = partial(unary, door, "Peer", name, reply, said)
                else:
                    call = partial(unary, door, "Peer", name, reply, said)
                cases.append((call, said))
        rng.shuffle(cases)
        await all_judged(attacked, cases)


@counts
async def test_readers(attacked: Target, rng: random.Random, count: int) -> None:
    own, other = attacked.engine.ranks[0], attacked.friend.ranks[0]
    async with raw_engine(attacked) as raw, doors(attacked) as (_, door):
        for request_id in REQUESTS:
            await own.client.publish(f"own-{request_id}", blocks().tables(), 20, readers=1 << 20, ttl_s=LONG_S)
        asked_first = peer_pb2.HandshakeRequest(**SPOKEN, engine_id=attacked.engine.engine_id)
        met = unary(door, "Peer", "Handshake", peer_pb2.HandshakeReply, asked_first)
        assert isinstance(met, peer_pb2.HandshakeReply)
        opening = peer_pb2.ReadRequest(
            opening=peer_pb2.ReadOpening(
                engine_id=attacked.engine.engine_id,
                epoch=attacked.engine.epoch,
                reader=peer_pb2.Reader(engine_id="reader", epoch="1", rank=0, world_size=1),
                agent_name=met.agent_name,
            )
        )
        pairing = peer_pb2.PairRequest(
            engine_id=attacked.engine.engine_id, epoch=attacked.engine.epoch,
            sources=[manifest_to_proto(own.manifest)], destination=manifest_to_proto(other.manifest),
        )  # fmt: skip
        named = unary(door, "Peer", "Pair", peer_pb2.PairReply, pairing)
        assert isinstance(named, peer_pb2.PairReply)
        asked = peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=1, request_id="own-r0"))
        replies = streamed(door, "Peer", "Read", peer_pb2.ReadReply, [opening, asked], 1)
        assert isinstance(replies[0], peer_pb2.ReadReply)
        update = replies[0].update
        wanted = wanting(blocks().tables(), (0, 20), states=True, chunk_nbytes=CHUNK)
        chunks = packs(share_of([own.manifest], other.manifest, 0), 0, blocks().tables(), wanted)
        wanted.MergeFrom(
            peer_pb2.PackOpen(
                request_id="own-r0", word=update.word, version=update.version, pairing=named.pairing,
                chunks=len(chunks), nbytes=sum(each.nbytes for each in chunks),
            )
        )  # fmt: skip
        pack = peer_pb2.Pack(reading=1, packing=1, open=wanted, want=range(len(chunks)))
        making = hostile(rng, attacked, raw)
        making.known |= {"word": [update.word], "version": [1], "pairing": [named.pairing], "known_word": [update.word]}
        making.known["chunk_nbytes"] = [CHUNK, 4096, 256]

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
        for request_id in REQUESTS:
            await own.client.abort(f"own-{request_id}")


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
