"""Misuse by peers, strangers and the command line is refused with a reason, and the daemon lives on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from fleet import BEFORE, SPOKEN, TIMEOUT_S, ByHand, Daemons, Joining, peer_stub, refusal, serving
from lives import engine_on
from ranks import Blocks, Shape, start_rank
from victim import NOWHERE, Victim

from kvferry.engine import TransferFailed
from kvferry.outbox import SEVERAL
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.schemas import DestinationBody, LeaseState, OrderBody, SourceBody
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import tables_to_proto
from support import refused

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("unharmed", "lives_on")]
LATER = {"protocol_min": PROTOCOL_MAX + 1, "protocol_max": PROTOCOL_MAX + 9}


def reader_of(victim: Victim, stub: peer_pb2_grpc.PeerAsyncStub, **change: Any) -> ByHand:
    told: dict[str, Any] = {
        "engine_id": "victim",
        "epoch": victim.engine.epoch,
        "reader": peer_pb2.Reader(engine_id="by hand", epoch="1", rank=0, world_size=1),
    }
    return ByHand(stub, peer_pb2.ReadOpening(**told | change))


async def test_a_peer_of_another_protocol_is_told_both_ranges(victim: Victim) -> None:
    async with peer_stub(victim.daemon) as stub:
        for call, request in (
            (stub.Handshake, peer_pb2.HandshakeRequest(**LATER, engine_id="victim")),
            (stub.Handshake, peer_pb2.HandshakeRequest(**BEFORE, engine_id="victim")),
            (stub.Handshake, peer_pb2.HandshakeRequest(engine_id="victim")),
        ):
            error = await refusal(call(request))
            assert error.code == "protocol"
            assert f"this daemon {PROTOCOL_MIN} to {PROTOCOL_MAX}" in error.message
        for other in (LATER, BEFORE):
            joining = peer_pb2.JoinRequest(**other, engine_id="victim")
            assert (await refusal(stub.Join(joining).read())).code == "protocol"


async def test_a_handshake_with_an_engine_that_is_not_here_is_refused(victim: Victim) -> None:
    async with peer_stub(victim.daemon) as stub:
        request = peer_pb2.HandshakeRequest(**SPOKEN, engine_id="nobody")
        assert (await refusal(stub.Handshake(request))).code == "unknown_engine"


OPENS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown engine": ({"engine_id": "nobody"}, "unknown_engine"),
    "an old epoch": ({"epoch": "old"}, "stale_epoch"),
    "another registration of the engine": ({"agent_name": "kvferry-0123456789abcdef"}, "stale_instance"),
    "no reader": ({"reader": peer_pb2.Reader()}, "malformed_reader"),
    "a reader outside its world": (
        {"reader": peer_pb2.Reader(engine_id="x", epoch="1", rank=3, world_size=2)},
        "malformed_reader",
    ),
}


@pytest.mark.parametrize(("change", "code"), OPENS.values(), ids=OPENS.keys())
async def test_a_lease_is_not_opened_for_nonsense(victim: Victim, change: dict[str, Any], code: str) -> None:
    async with peer_stub(victim.daemon) as stub:
        reader = reader_of(victim, stub, **change)
        await reader.introduce()
        assert (await refusal(reader.call.read())).code == code


async def test_a_reader_that_makes_no_sense_is_told_so(victim: Victim, request_id: str) -> None:
    async with peer_stub(victim.daemon) as stub:
        assert (await reader_of(victim, stub).open("")).problem.code == "malformed_request_id"
        closing = peer_pb2.ReadRequest(close=peer_pb2.LeaseClose(request_id=request_id))
        nested = peer_pb2.ReadRequest(several=peer_pb2.ReadRequests(requests=[closing]))
        for said in (
            {},
            {"opening": peer_pb2.ReadOpening()},
            {"several": peer_pb2.ReadRequests(requests=[nested])},
            {"several": peer_pb2.ReadRequests(requests=[closing] * (SEVERAL + 1))},
        ):
            reader = reader_of(victim, stub)
            await reader.say(**said)
            assert (await refusal(reader.call.read())).code == "malformed_read"
        reader = reader_of(victim, stub)
        for _ in range(2):
            await reader.say(open=peer_pb2.LeaseOpen(reading=1, request_id=request_id))
        assert (await refusal(reader.heard())).code == "malformed_read"
        silent = stub.Read()
        await silent.write(peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=1, request_id=request_id)))
        assert (await refusal(silent.read())).code == "malformed_stream"


@pytest.mark.parametrize("several", [True, False])
async def test_a_reader_gets_several_in_one_only_where_it_takes_that(
    victim: Victim, request_id: str, several: bool
) -> None:
    client, names = victim.engine.ranks[0].client, [f"{request_id}-{n}" for n in range(8)]
    for n, name in enumerate(names):
        await client.publish(name, Blocks((n,), 1).tables(), 8)
    async with peer_stub(victim.daemon) as stub:
        reader = reader_of(victim, stub, several=several)
        opens = [
            peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=number, request_id=name))
            for number, name in enumerate(names, 1)
        ]
        await reader.say(several=peer_pb2.ReadRequests(requests=opens))
        heard: list[int] = []
        messages = 0
        while len(heard) < len(names):
            told, messages = await reader.heard(), messages + 1
            assert told.HasField("several") <= several
            found = told.several.replies if told.HasField("several") else [told]
            heard += [reply.reading for reply in found if reply.HasField("update")]
        assert heard == [*range(1, len(names) + 1)]
        assert messages < len(names) if several else messages == len(names)
        reader.call.cancel()
    for name in names:
        await client.abort(name)


async def test_a_lease_is_closed_only_by_who_opened_it(victim: Victim, request_id: str) -> None:
    client = victim.engine.ranks[0].client
    await client.publish(request_id, Blocks((1, 2), 1).tables(), 20)
    async with peer_stub(victim.daemon) as stub:
        reader, other = reader_of(victim, stub), reader_of(victim, stub)
        assert (await reader.open(request_id)).update.num_tokens == 20
        assert (await other.open(request_id)).problem.code == "already_reading"
        for reading in (0, 1, 9):  # nothing opened, one that was refused, and one that never was
            await other.say(close=peer_pb2.LeaseClose(reading=reading, request_id=request_id, complete=True))
        assert (await other.open("", reading=2)).problem.code == "malformed_request_id"  # so the closes were taken
        assert [lease.state for lease in await victim.router.leases()] == [LeaseState.PUBLISHED]
        reader.call.cancel()
        other.call.cancel()
    await client.abort(request_id)


async def test_an_order_between_ranks_is_checked_like_any_other(daemons: Daemons, victim: Victim) -> None:
    """Rank 0 is real, rank 1 is played here."""
    good = engine_pb2.Source(engine_id="prefill", address="127.0.0.1:9")
    tables = tables_to_proto(Blocks((1, 99), 1).tables())
    (daemon,) = await daemons.start("of-two")
    real = await start_rank("of-two", daemon.socket, Shape.tp(2, num_blocks=32), 0, "1")
    played = Joining()
    async with serving(played) as address, peer_stub(daemon) as stub:
        member = peer_pb2.Member(rank=1, address=address, epoch="1")
        joining = peer_pb2.JoinRequest(**SPOKEN, engine_id="of-two", member=member, world_size=2)
        held = stub.Join(joining)
        await held.read()
        for change, code in (
            ({"engine_id": "nobody"}, "unknown_engine"),
            ({"key": b""}, "not_a_rank"),
            ({"request_id": ""}, "malformed_request_id"),
            ({"source": engine_pb2.Source(engine_id="prefill", address=NOWHERE)}, "address_not_allowed"),
            ({"source": engine_pb2.Source()}, "malformed_address"),
            ({"tables": tables}, "block_id_out_of_range"),
            ({"deadline_s": math.nan}, "malformed_seconds"),
            ({"attempt": None}, "number_required"),
        ):
            told: dict[str, Any] = {
                "engine_id": "of-two", "request_id": "bad", "source": good, "key": played.key,
                "attempt": peer_pb2.Attempt(number=1),
            }  # fmt: skip
            assert (await refusal(stub.Order([peer_pb2.OrderRequest(**told | change)]).read())).code == code
        assert (await refusal(stub.Abort(peer_pb2.AbortRequest(engine_id="nobody", request_id="r")))).code == (
            "unknown_engine"
        )
        for order, field in ((b"", "order"), (b"{}", "order.request_id"), (b'{"request_id": "r"}', "order.source")):
            asked = peer_pb2.LeadRequest(engine_id="of-two", order=order, key=played.key)
            error = await refusal(stub.Lead(asked))
            assert (error.code, error.field) == ("malformed_order", field)
        numbered = {"engine_id": "of-two", "key": played.key}
        of_another = OrderBody(
            request_id="r", source=SourceBody(engine_id="prefill", address="127.0.0.1:9"),
            destination=DestinationBody(engine_id="another"),
        )  # fmt: skip
        error = await refusal(stub.Lead(peer_pb2.LeadRequest(**numbered, order=of_another.model_dump_json().encode())))
        assert (error.code, error.field) == ("malformed_order", "order.destination.engine_id")
        for call, request, code in (
            (stub.Record, peer_pb2.RecordRequest(**numbered, transfer_id="x"), "unknown_transfer"),
            (stub.Record, peer_pb2.RecordRequest(**numbered, transfer_id="x", wait_s=math.inf), "malformed_seconds"),
        ):
            assert (await refusal(call(request))).code == code  # type: ignore[operator]
        held.cancel()
    await real.client.close()


class Renumbering(peer_pb2_grpc.PeerServicer):
    """A source that has the handshake of a real one, and tells of leases of these numbers when it is asked."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.said = numbers, peer_pb2.HandshakeReply()

    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: object) -> peer_pb2.HandshakeReply:
        return self.said

    async def Read(
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: object
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        tables, word = tables_to_proto(Blocks((1, 2), 1).tables()), self.said.regions[0].address
        async for request in requests:
            for version, number in enumerate(self.numbers if request.HasField("open") else [], 1):
                update = peer_pb2.LeaseUpdate(
                    tables=tables,
                    num_tokens=version,
                    more=True,
                    word_address=word,
                    word=1,
                    version=version,
                    lease=number,
                )
                yield peer_pb2.ReadReply(reading=request.open.reading, update=update)


@pytest.mark.parametrize("numbers", [[0], [3, 4], [3, 0]], ids=["none", "another one", "none at last"])
async def test_a_source_that_does_not_say_which_lease_it_tells_of_is_refused(
    daemons: Daemons, stack: AsyncExitStack, victim: Victim, request_id: str, numbers: list[int]
) -> None:
    """Or tells of two in one reading."""
    (daemon,) = await daemons.start(f"renumbering-{len(numbers)}-{sum(numbers)}")
    real, _ = await engine_on(stack, daemon.name, daemon)
    played = Renumbering(numbers)
    async with peer_stub(daemon) as stub, serving(played) as address:
        played.said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=daemon.name))
        played.said.members[0].address = address
        source = real.source().model_copy(update={"address": address})
        with refused("malformed_update", TransferFailed, field="lease", value=str(numbers[-1])) as failed:
            await victim.engine.receive(request_id, victim.engine.take(20), source=source)
        assert failed.value.blocks_safe
        await victim.router.forget_peer(daemon.name)


GARBAGE = {
    "noise": os.urandom(4096),
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2 and then noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(1000),
    "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_on_a_port_harms_nobody(victim: Victim, garbage: bytes) -> None:
    host, _, port = victim.daemon.peer.rpartition(":")
    for open_door in (
        lambda: asyncio.open_connection(host, int(port)),
        lambda: asyncio.open_connection(host, int(victim.daemon.url.rpartition(":")[2])),
        lambda: asyncio.open_unix_connection(victim.daemon.socket),
    ):
        _, writer = await open_door()
        writer.write(garbage)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    assert await victim.router.healthy()


async def test_bytes_that_are_no_message_are_refused(victim: Victim) -> None:
    async with grpc.aio.insecure_channel(victim.daemon.peer) as channel:
        for method in ("Handshake", "Nothing"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/kvferry.v1.Peer/{method}")(b"\xff" * 100)
            assert caught.value.code() is not grpc.StatusCode.OK


async def test_a_message_beyond_the_limit_is_refused(victim: Victim) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(victim.daemon.peer, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/kvferry.v1.Peer/Handshake")(bytes(17 << 20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_from_an_address_that_is_not_allowed_learns_nothing(daemons: Daemons, victim: Victim) -> None:
    (closed,) = await daemons.start("closed", 1, "--allow-peers", "10.9.8.0/24")
    async with peer_stub(closed) as stub:
        request = peer_pb2.HandshakeRequest(**SPOKEN, engine_id="x")
        assert (await refusal(stub.Handshake(request))).code == "address_not_allowed"


# the command line and the settings


COMMANDS: dict[str, tuple[list[str], str]] = {
    "an address that is none": (["serve", "--rest", "nonsense"], "rest"),
    "a number that is none": (["serve", "--arena-mb", "many"], "arena_mb"),
    "a number out of range": (["serve", "--lease-ttl-s", "-1"], "lease_ttl_s"),
    "a file that is missing": (["serve", "--config", "/nonexistent.toml"], "config"),
    "half of TLS": (["serve", "--tls-cert", __file__], "tls_key"),
    "an unknown command": (["fly"], "fly"),
    "a peer that is none": (["peers", "--prewarm", "nonsense"], "nonsense"),
    "a daemon that is not there": (["status", "--daemon", "http://127.0.0.1:9"], "127.0.0.1:9"),
    "a state that is none": (["transfers", "--state", "happy"], "happy"),
}


@pytest.mark.parametrize(("arguments", "named"), COMMANDS.values(), ids=COMMANDS.keys())
async def test_a_command_that_makes_no_sense_exits_2_and_names_what_was_wrong(
    victim: Victim, arguments: list[str], named: str
) -> None:
    if arguments[0] in ("transfers", "peers"):
        arguments = [*arguments, "--daemon", victim.daemon.url]
    command = [sys.executable, "-c", "import sys; from kvferryd.commands.cli import main; sys.exit(main())", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
