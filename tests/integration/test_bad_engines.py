"""Misuse of the engine's door is refused with a reason: sessions, memory, manifests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest
from fleet import BEFORE, SPOKEN, Daemons, owned_regions, refusal, until
from ranks import Blocks, describe
from victim import SHAPE, Victim

from kvferry.engine import EngineClient
from kvferry.errors import KvferryError
from kvferry.memory import memfd_region
from kvferry.outbox import SEVERAL
from kvferry.rpc import error_of
from kvferry.v1 import engine_pb2, layout_pb2
from kvferry.wire import manifest_to_proto
from support import refused

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("unharmed", "lives_on")]


async def attach(**change: Any) -> AsyncIterator[engine_pb2.Command]:
    """The commands of an engine that attaches and says nothing more."""
    told = {**SPOKEN, "engine_id": "bad", "epoch": "1", "rank": 0, "world_size": 1}
    yield engine_pb2.Command(attach=engine_pb2.AttachRequest(**told | change))


ATTACH: dict[str, tuple[dict[str, Any], str]] = {
    "a protocol of tomorrow": ({"protocol_min": 99, "protocol_max": 99}, "protocol"),
    "the protocol before this one": (BEFORE, "protocol"),
    "a protocol backwards": ({"protocol_min": 2, "protocol_max": 1}, "protocol"),
    "no engine id": ({"engine_id": ""}, "malformed_attach"),
    "no epoch": ({"epoch": ""}, "malformed_attach"),
    "an endless engine id": ({"engine_id": "x" * 257}, "malformed_attach"),
    "a rank that is not there": ({"rank": 1}, "rank_out_of_range"),
    "no world": ({"world_size": 0}, "rank_out_of_range"),
    "a world beyond counting": ({"world_size": (1 << 32) - 1}, "rank_out_of_range"),
    "an engine that is attached": ({"engine_id": "victim", "epoch": "2"}, "engine_attached"),
}


@pytest.mark.parametrize(("change", "code"), ATTACH.values(), ids=ATTACH.keys())
async def test_an_engine_that_makes_no_sense_is_not_attached(victim: Victim, change: dict[str, Any], code: str) -> None:
    error = await refusal(victim.engine_door.Attach(attach(**change)).read())
    assert error.code == code, error
    assert [engine.engine_id for engine in await victim.router.engines()] == ["victim"]


async def test_an_engine_whose_own_session_is_still_open_is_told_what_to_close(victim: Victim) -> None:
    with refused("engine_attached") as caught:
        await EngineClient.connect(str(victim.daemon.socket), engine_id="victim", epoch="2")
    assert "one of your own that an error left open, which `async with` closes" in caught.value.remedy


async def test_every_call_asks_for_a_session_that_is_known(victim: Victim) -> None:
    door = victim.engine_door
    for call, request in (
        (door.Allocate, engine_pb2.AllocateRequest(session="x", nbytes=1)),
        (door.Adopt, engine_pb2.AdoptRequest(session="")),
        (door.Register, engine_pb2.RegisterRequest()),
    ):
        assert (await refusal(call(request))).code == "unknown_session"  # type: ignore[operator]


async def test_a_stream_that_does_not_begin_with_attach_is_ended(victim: Victim) -> None:
    async def commands() -> AsyncIterator[engine_pb2.Command]:
        yield engine_pb2.Command(publish=engine_pb2.PublishRequest(request_id="r"))

    assert (await refusal(victim.engine_door.Attach(commands()).read())).code == "malformed_stream"


async def test_a_command_that_is_none_is_refused_and_the_session_goes_on(victim: Victim) -> None:
    probe = engine_pb2.Command(id=8, probe=engine_pb2.Probe())
    answered, _ = await said_at_once(victim, [engine_pb2.Command(id=7), probe], several=False)
    assert [(answer.id, answer.problem.code) for answer in answered] == [(7, "malformed_command"), (8, "")]


async def test_several_commands_in_one_are_answered_each(victim: Victim) -> None:
    probe = engine_pb2.Command(id=7, probe=engine_pb2.Probe())
    nested = engine_pb2.Command(id=8, several=engine_pb2.Commands(commands=[probe]))
    answered, heard = await said_at_once(victim, [probe, nested, probe], several=True)
    assert [(answer.id, answer.problem.code) for answer in answered] == [(7, ""), (8, "malformed_command"), (7, "")]
    assert heard == 1, "the answers gathered, and came as one"
    answered, heard = await said_at_once(victim, [probe] * 3, several=False)
    assert len(answered) == heard == 3, "an engine of before gets one in each"


async def test_more_commands_than_may_be_in_one_end_the_session(victim: Victim) -> None:
    probes = [engine_pb2.Command(id=n, probe=engine_pb2.Probe()) for n in range(SEVERAL + 1)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await said_at_once(victim, probes, several=True)
    assert error_of(caught.value, "the daemon").code == "malformed_command"


async def said_at_once(
    victim: Victim, commands: Sequence[engine_pb2.Command], *, several: bool
) -> tuple[list[engine_pb2.Answer], int]:
    """(the answers to commands in one message, the messages in which they came)."""
    told = {**SPOKEN, "engine_id": "several", "epoch": "1", "world_size": 1}
    stream = victim.engine_door.Attach()
    await stream.write(engine_pb2.Command(attach=engine_pb2.AttachRequest(**told, several=several)))
    first = await stream.read()
    assert isinstance(first, engine_pb2.Event) and first.attached.several
    answers: list[engine_pb2.Answer] = []
    messages = 0
    try:
        await stream.write(engine_pb2.Command(several=engine_pb2.Commands(commands=commands)))
        async with asyncio.timeout(60):
            while len(answers) < len(commands):
                event, messages = await stream.read(), messages + 1
                assert isinstance(event, engine_pb2.Event), await stream.code()
                found = event.several.events if event.HasField("several") else [event]
                answers += [each.answer for each in found]
    finally:
        stream.cancel()
        await victim.engine_door.End(engine_pb2.EndRequest(session=first.attached.session, leave=True))
    return answers, messages


@contextlib.asynccontextmanager
async def newcomer(victim: Victim, epoch: str = "1") -> AsyncIterator[EngineClient]:
    """An engine beside the victim, attached and not registered."""
    client = await EngineClient.connect(str(victim.daemon.socket), engine_id="newcomer", epoch=epoch)
    try:
        yield client
    finally:
        await client.close()

        async def gone() -> bool:
            return len(await victim.router.engines()) == 1

        await until(gone, "the newcomer is retired")


async def test_an_engine_that_has_not_registered_can_neither_publish_nor_receive(victim: Victim) -> None:
    async with newcomer(victim) as client:
        blocks = Blocks((1,), 1)
        for attempt in (client.publish("r", blocks.tables(), 1), client.receive("r", blocks.tables())):
            assert (await refusal(attempt)).code == "not_registered"


async def test_memory_that_cannot_be_is_not_allocated(victim: Victim, daemons: Daemons) -> None:
    before = owned_regions(victim.daemon)
    async with newcomer(victim) as client:
        for nbytes, code in ((0, "malformed_region"), (1 << 50, "out_of_memory"), ((1 << 64) - 1, "out_of_memory")):
            with pytest.raises(KvferryError) as caught:
                await client.allocate(nbytes)
            assert caught.value.code == code, (nbytes, caught.value)
        await client.allocate(4096)
        assert (await refusal(client.allocate(4096))).code == "region_taken"

    async def freed() -> bool:
        return owned_regions(victim.daemon) == before

    await until(freed, "the newcomer's region is gone")


async def test_memory_that_is_not_there_is_not_adopted(victim: Victim) -> None:
    async with newcomer(victim) as client:

        async def adopting(memory: engine_pb2.Memory) -> KvferryError:
            memory.handed.ticket = memory.handed.ticket and await client._session.hand_over([short.file.fileno()])
            request = engine_pb2.AdoptRequest(session=client._session.id, memory=memory)
            return await refusal(victim.engine_door.Adopt(request))

        short = memfd_region(100)
        for nbytes, offset in ((101, 0), (1, 100), (1, 1 << 62), (1 << 62, 0)):
            handed = engine_pb2.HandedFile(ticket="some", offset=offset)
            error = await adopting(engine_pb2.Memory(region=0, nbytes=nbytes, handed=handed))
            assert error.code == "region_unavailable", (nbytes, offset, error)
        handed = engine_pb2.HandedFile(ticket="some")
        assert (await adopting(engine_pb2.Memory(region=0, handed=handed))).code == "malformed_region"
        handed = engine_pb2.HandedFile()
        assert (await adopting(engine_pb2.Memory(region=0, nbytes=1, handed=handed))).code == "wrong_memory_kind"
        short.close()
        cuda = engine_pb2.Memory(region=0, nbytes=1, cuda=engine_pb2.CudaAllocation(handle=b"x" * 64))
        request = engine_pb2.AdoptRequest(session=client._session.id, memory=cuda)
        assert (await refusal(victim.engine_door.Adopt(request))).code == "wrong_memory_kind"


Change = Callable[[layout_pb2.Manifest], object]
MANIFESTS: dict[str, tuple[Change, str]] = {
    "another engine's": (lambda m: setattr(m, "engine_id", "other"), "session_mismatch"),
    "another epoch's": (lambda m: setattr(m, "epoch", "2"), "session_mismatch"),
    "a region that is too small": (lambda m: setattr(m.regions[0], "nbytes", 1), "out_of_region"),
    "a region larger than allocated": (lambda m: setattr(m.regions[0], "nbytes", 1 << 40), "region_mismatch"),
    "a region of another kind": (lambda m: setattr(m.regions[0], "kind", 2), "region_mismatch"),
    "a region that was never allocated": (lambda m: m.regions.add(id=7, kind=1, nbytes=1), "region_mismatch"),
    "a kind of tomorrow": (lambda m: setattr(m.regions[0], "kind", 9), "malformed_manifest"),
    "no components": (lambda m: m.ClearField("components"), "malformed_manifest"),
    "no model": (lambda m: m.ClearField("model"), "malformed_manifest"),
    "a component twice": (lambda m: m.components.append(m.components[0]), "duplicate"),
    "an unknown dtype": (lambda m: setattr(m.components[0], "dtype", "float3"), "unknown_dtype"),
    "overlapping strides": (lambda m: setattr(m.components[0].axes[0], "stride", 1), "overlapping_strides"),
    "an offset beyond": (lambda m: setattr(m.components[0], "offset", 1 << 40), "out_of_region"),
    "extents beyond counting": (lambda m: setattr(m.groups[0], "num_blocks", 1 << 63), "malformed_manifest"),
    "a shard that leaves its axis": (lambda m: setattr(m.components[0].shard, "start", 99), "shard_range"),
}


async def test_a_manifest_that_makes_no_sense_is_refused_and_a_good_one_is_taken_after_it(victim: Victim) -> None:
    async with newcomer(victim, "manifests") as client:
        region = await client.allocate(SHAPE.nbytes(0))
        good = describe("newcomer", "manifests", SHAPE, 0, region)
        for what, (change, code) in MANIFESTS.items():
            message = manifest_to_proto(good)
            change(message)
            error = await refusal(
                victim.engine_door.Register(engine_pb2.RegisterRequest(session=client._session.id, manifest=message))
            )
            assert error.code == code, (what, error)
            assert error.field, what
        await client.register(good)
        assert (await refusal(client.register(good))).code == "already_registered"


async def test_an_epoch_is_registered_once(victim: Victim) -> None:
    async def start(epoch: str) -> None:
        async with newcomer(victim, epoch) as client:
            await client.register(describe("newcomer", epoch, SHAPE, 0, await client.allocate(SHAPE.nbytes(0))))

    await start("once")
    assert (await refusal(start("once"))).code == "epoch_reused"
    await start("twice")
