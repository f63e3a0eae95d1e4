"""Messages that wait for a stream go out in order, and together where the other side takes several in one."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.outbox import SEVERAL, SEVERAL_NBYTES, Outbox
from kvferry.v1 import engine_pb2

pytestmark = pytest.mark.anyio


def outbox(*, several: bool = True) -> Outbox[engine_pb2.Command]:
    bundle = lambda commands: engine_pb2.Command(several=engine_pb2.Commands(commands=commands))  # noqa: E731
    return Outbox(bundle, several=several)


def command(number: int, nbytes: int = 0) -> engine_pb2.Command:
    return engine_pb2.Command(id=number, publish=engine_pb2.PublishRequest(metadata=bytes(nbytes)))


def numbers(message: engine_pb2.Command | None) -> list[int]:
    assert message is not None
    several = message.several.commands if message.HasField("several") else [message]
    return [each.id for each in several]


async def test_what_has_gathered_goes_out_as_one() -> None:
    box = outbox()
    for number in range(1, 6):
        box.put(command(number))
    assert numbers(await box.take()) == [1, 2, 3, 4, 5]
    assert box.pop() is None


async def test_one_alone_goes_out_as_it_is_and_waits_for_nobody() -> None:
    box = outbox()
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(command(1))
    assert await waiting == command(1)


async def test_who_takes_one_gets_one() -> None:
    box = outbox(several=False)
    for number in (1, 2, 3):
        box.put(command(number))
    assert [numbers(await box.take()) for _ in range(3)] == [[1], [2], [3]]


async def test_no_message_grows_beyond_what_gRPC_carries() -> None:
    box = outbox()
    for number in range(1, SEVERAL + 11):
        box.put(command(number))
    box.put(command(1000, SEVERAL_NBYTES // 2))
    box.put(command(1001, 8 * SEVERAL_NBYTES))
    box.put(command(1002))
    taken = [numbers(await box.take()) for _ in range(4)]
    assert taken == [[*range(1, SEVERAL + 1)], [*range(SEVERAL + 1, SEVERAL + 11), 1000], [1001], [1002]]


async def test_who_asks_again_is_asked_once_and_says_what_holds_then() -> None:
    box, said = outbox(), [command(1)]

    def compose() -> engine_pb2.Command | None:
        return said.pop() if said else None

    box.ask(compose)
    box.put(command(2))
    box.ask(compose)
    assert numbers(await box.take()) == [1, 2]
    box.ask(compose)
    box.put(command(3))
    assert numbers(await box.take()) == [3], "nothing was to be said any more"


async def test_nothing_is_taken_after_the_end_but_what_was_there() -> None:
    box = outbox()
    box.put(command(1))
    box.end()
    box.put(command(2))
    assert numbers(await box.take()) == [1]
    assert await box.take() is None


async def test_the_end_wakes_who_waits() -> None:
    box = outbox()
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.end()
    assert await waiting is None


async def test_a_box_that_was_given_up_is_empty_and_stays_so() -> None:
    box = outbox()
    box.put(command(1, SEVERAL_NBYTES))
    box.put(command(2, SEVERAL_NBYTES))
    assert numbers(await box.take()) == [1]  # the other one does not fit
    box.put(command(3))
    box.give_up()
    box.put(command(4))
    assert not box._waiting and await box.take() is None


async def test_what_is_settled_goes_out_as_it_was_and_is_not_composed_again() -> None:
    box, said = outbox(several=False), ["first"]

    def compose() -> engine_pb2.Command:
        return engine_pb2.Command(id=len(said))

    box.settle(compose)
    assert len(box) == 0, "it was not asked for"
    box.ask(compose)
    box.settle(compose)
    said.append("later")
    assert (await box.take()).id == 1  # type: ignore[union-attr]
    assert len(box) == 0
