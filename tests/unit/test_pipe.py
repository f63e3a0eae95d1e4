"""A pipe: messages go in at one end and come out at the other, in order, whole, and no more than both have room for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry import pipe
from kvferry.errors import Malformed
from kvferry.memory.handover import framed
from kvferry.outbox import Outbox
from kvferry.pipe import ROOM, TURN, Pipe
from kvferry.rpc import MAX_MESSAGE
from kvferry.v1 import engine_pb2

pytestmark = pytest.mark.anyio
TIMEOUT_S = 20.0


@pytest.fixture(scope="module", params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """An engine's process may run either: SGLang's run uvloop, whose transports are no class of asyncio's."""
    return "asyncio", {"use_uvloop": request.param}


def outbox() -> Outbox[engine_pb2.Command]:
    return Outbox(lambda commands: engine_pb2.Command(several=engine_pb2.Commands(commands=commands)), several=True)


def command(number: int, nbytes: int = 0) -> engine_pb2.Command:
    return engine_pb2.Command(id=number, publish=engine_pb2.PublishRequest(metadata=bytes(nbytes)))


class End:
    """A pipe, and the numbers that have come by it."""

    def __init__(self, on_message: Callable[[int], None] = lambda _: None) -> None:
        self.came: list[int] = []
        self.outbox = outbox()

        def take(message: bytes) -> None:
            number = engine_pb2.Command.FromString(message).id
            self.came.append(number)
            self.some.set()
            on_message(number)

        self.some = asyncio.Event()
        self.pipe = Pipe(self.outbox, take)

    async def until_came(self, count: int) -> list[int]:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.came) < count:
                self.some.clear()
                await self.some.wait()
        return self.came


async def joined(pipe: Pipe, end: socket.socket) -> None:
    end.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: pipe, sock=end)
    pipe.begin(transport)


@asynccontextmanager
async def both(far: Callable[[int], None] = lambda _: None) -> AsyncIterator[tuple[End, End]]:
    one, other = End(), End(far)
    for each, end in zip((one, other), socket.socketpair(), strict=True):
        await joined(each.pipe, end)
    try:
        yield one, other
    finally:
        for each in (one, other):
            each.pipe.abort()
            await over(each.pipe)


@asynccontextmanager
async def by_hand(end: End) -> AsyncIterator[socket.socket]:
    """The other end of its pipe."""
    own, other = socket.socketpair()
    other.setblocking(False)
    with other:
        await joined(end.pipe, own)
        yield other
        end.pipe.abort()
        await over(end.pipe)


async def over(pipe: Pipe) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.shield(pipe.over)


async def test_messages_come_in_their_order_both_ways() -> None:
    async with both() as (one, other):
        for number in range(1, 500):
            one.outbox.put(command(number))
            other.outbox.put(command(1000 + number))
        assert await other.until_came(499) == list(range(1, 500))
        assert await one.until_came(499) == list(range(1001, 1500))


async def test_what_waited_before_it_was_connected_goes_by_it_and_take_has_nothing() -> None:
    one, other = End(), End()
    one.outbox.put(command(1))
    assert await one.outbox.take() == command(1)
    taking = asyncio.create_task(one.outbox.take())
    await asyncio.sleep(0)
    ends = socket.socketpair()
    await joined(one.pipe, ends[0])
    assert await taking is None
    one.outbox.put(command(2))
    await joined(other.pipe, ends[1])
    assert await other.until_came(1) == [2]
    one.pipe.abort()
    await over(other.pipe)


async def test_the_first_of_a_turn_goes_at_once_and_the_others_together() -> None:
    end = End()
    async with by_hand(end) as other:
        for number in (1, 2, 3):
            end.outbox.put(command(number))
        assert other.recv(1 << 16) == framed(command(1)), "the others gather"
        together = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(other, 1 << 16), TIMEOUT_S)
        assert together == framed(command(2)) + framed(command(3))


async def test_a_message_in_pieces_is_taken_when_it_is_whole() -> None:
    end = End()
    async with by_hand(end) as other:
        said = framed(command(7, nbytes=5000)) + framed(command(8))
        for at in range(0, len(said), 611):
            other.send(said[at : at + 611])
            await asyncio.sleep(0)
        assert await end.until_came(2) == [7, 8]


async def test_what_the_other_side_does_not_read_waits_in_the_outbox() -> None:
    end = End()
    async with by_hand(end) as other:
        for number in range(1, 301):
            end.outbox.put(command(number, nbytes=ROOM // 2))
        for _ in range(10):
            await asyncio.sleep(0)
        waiting = len(end.outbox)
        assert waiting > 250
        assert end.outbox.taken == 300 - waiting
        other.recv(64)
        read = bytearray()
        while len(end.outbox):
            read += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(other, 1 << 20), TIMEOUT_S)


async def test_a_long_line_of_messages_does_not_hold_up_the_loop() -> None:
    turns: list[int] = []
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        asyncio.get_running_loop().call_soon(tick)

    async with both(lambda _: turns.append(ticks)) as (one, other):
        tick()
        for number in range(10 * TURN):
            one.outbox.put(command(1 + number))
        await other.until_came(10 * TURN)
        assert max(turns.count(each) for each in set(turns)) <= TURN


async def test_nothing_is_taken_while_it_is_held_and_all_of_it_then() -> None:
    def hold(number: int) -> None:
        if number == 5:
            other.pipe.hold()

    async with both(hold) as (one, other):
        for number in range(1, 200):
            one.outbox.put(command(number))
        await other.until_came(5)
        for _ in range(20):
            await asyncio.sleep(0)
        assert other.came == [1, 2, 3, 4, 5]
        other.pipe.go_on()
        assert await other.until_came(199) == list(range(1, 200))


async def test_an_outbox_that_ends_is_emptied_before_the_pipe_closes() -> None:
    async with both() as (one, other):
        for number in range(1, 400):
            one.outbox.put(command(number, nbytes=1000))
        one.outbox.end()
        await over(other.pipe)
        assert other.came == list(range(1, 400))
        assert other.pipe.problem is None


async def test_a_pipe_is_over_only_when_what_came_has_been_taken() -> None:
    async with both() as (one, other):
        other.pipe.hold()
        one.outbox.put(command(1))
        one.outbox.end()
        await over(one.pipe)
        other.pipe.go_on()
        await over(other.pipe)
        assert other.came == [1]


async def test_what_a_pipe_brought_is_taken_when_it_is_lost_though_it_was_held() -> None:
    end = End(lambda _: end.pipe.hold())
    async with by_hand(end) as other:
        other.send(b"".join(framed(command(number)) for number in (1, 2, 3)))
        assert await end.until_came(1) == [1]
        for number in range(300):
            end.outbox.put(command(number, nbytes=ROOM // 2))
        other.close()
        await over(end.pipe)
    assert end.came == [1, 2, 3]


@pytest.mark.parametrize("how", ["the outbox ends", "the other end sends nothing more"])
async def test_a_pipe_ends_soon_though_nobody_reads_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "CLOSES_S", 0.05)
    end = End()
    async with by_hand(end) as other:
        for number in range(300):
            end.outbox.put(command(number, nbytes=ROOM // 2))
        if how == "the outbox ends":
            end.outbox.end()
        else:
            other.shutdown(socket.SHUT_WR)
        await over(end.pipe)


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, (1 << 32) - 1])
async def test_a_length_beyond_what_a_message_may_have_ends_it_by_name(length: int) -> None:
    end = End()
    async with by_hand(end) as other:
        other.send(framed(command(1)) + length.to_bytes(4, "big") + bytes(100))
        await over(end.pipe)
    assert end.came == [1]
    assert isinstance(end.pipe.problem, Malformed)
    assert (end.pipe.problem.field, end.pipe.problem.value) == ("length", str(length))
    assert end.pipe.problem.remedy


async def test_nothing_is_taken_behind_a_message_that_cannot_be() -> None:
    def refuse(number: int) -> None:
        if number == 2:
            raise Malformed("malformed_command", "no", field="kind")

    async with both(refuse) as (one, other):
        for number in (1, 2, 3):
            one.outbox.put(command(number))
        await over(other.pipe)
        assert other.came == [1, 2]
        assert isinstance(other.pipe.problem, Malformed)
        await over(one.pipe)
        assert one.pipe.problem is None


async def test_one_that_was_given_up_before_it_was_connected_is_over() -> None:
    end = End()
    end.pipe.abort()
    await over(end.pipe)
    own, other = socket.socketpair()
    with other:
        await joined(end.pipe, own)
        end.outbox.put(command(1))
        other.settimeout(TIMEOUT_S)
        assert await asyncio.to_thread(other.recv, 100) == b"", "nothing goes by it"
    assert len(end.outbox) == 1


@pytest.mark.parametrize("how", ["ends", "is lost"])
async def test_a_pipe_that_is_over_leaves_the_loop_alone(how: str) -> None:
    """It went on asking an outbox that had ended, in each turn of the loop."""
    async with both() as (one, other):
        one.outbox.put(command(1))
        if how == "ends":
            one.outbox.end()
        else:
            other.pipe.abort()
        await over(one.pipe)
        one.outbox.end()
        for _ in range(3):
            await asyncio.sleep(0)
        loop, called = asyncio.get_running_loop(), []
        soon = loop.call_soon

        def counted(call: Callable[..., object], *arguments: object, **named: object) -> asyncio.Handle:
            called.append(call)
            return soon(call, *arguments, **named)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loop, "call_soon", counted)
            for _ in range(5):
                await asyncio.sleep(0)
        assert not [each for each in called if getattr(each, "__self__", None) is one.pipe]
