"""Faults that are planted in an engine's book."""

from __future__ import annotations

from typing import Any

from planted import changed, no_effects, nothing, without

from kvferry.protocol import book_events as e
from kvferry.protocol import book_values as values
from kvferry.protocol.book import Book
from kvferry.protocol.book_values import Lease, Receive


def quiet_at_its_end(effects: Any, book: Book, receive: Receive, event: Any) -> Any:
    return [*effects, *(e.Quiet(each.call) for each in effects if isinstance(each, e.Ended))][: len(effects) + 1]


def any_transfer(book: Book, receive: Receive, event: Any, heard: Any = Book._heard) -> Any:
    receive.transfer_id = receive.transfer_id and event.transfer_id
    return heard(book, receive, event)


def forgotten(effects: Any, book: Book, *_: Any) -> Any:
    book.start.lost.clear()
    return effects


def twice(effects: Any, *_: Any) -> Any:
    return [*effects, *(each for each in effects if isinstance(each, e.LeaseEnded))]


def at_once(effects: Any, book: Book, why: Any) -> Any:
    return [*effects, *(e.Quiet(each.call) for each in effects)]


def not_early(book: Book, receive: Receive, answer: e.Answered, answered: Any = Book._receive_answered) -> Any:
    receive.early.clear()
    return answered(book, receive, answer)


def without_more(book: Book, call: Any, said: e.Publish, problem: Any, answered: Any = Book._publish_answered) -> Any:
    call.aborted = False
    return answered(book, call, said, problem)


def any_weights(book: Book, receive: Receive, event: Any, heard: Any = Book._heard) -> Any:
    receive.weights = book.start.weights
    return heard(book, receive, event)


def same_numbers(effects: Any, book: Book, *_: Any) -> Any:
    book.start.leases = iter((1, 2, 3))  # type: ignore[assignment]
    return effects


def at_the_end(book: Book, request_id: str, lease: Lease, forget: Any = Book._forget) -> None:
    if lease.over:
        forget(book, request_id, lease)


def unaborted(book: Book, receive: Receive, free: Any = Book._free) -> Any:
    return []


def not_waited_for(book: Book, call: Any, go: Any = Book._go) -> Any:
    if isinstance(call, Receive):
        book._receives.pop(call.said.request_id, None)  # type: ignore[union-attr]
    return go(book, call)


def by_new_weights(book: Book, call: Any, said: e.Publish, problem: Any, answered: Any = Book._publish_answered) -> Any:
    call.weights = book.start.weights
    return answered(book, call, said, problem)


def refused(book: Book, call: Any, leave: Any = Book._leave) -> Any:
    if call in book._waiting:
        return book._tell(call, e.Refused(call.said.call, values.registering()))
    return leave(book, call)


def what_is_taken(leases: Any, *_: Any) -> list[str]:
    return [name for (name, _), lease in leases.items() if lease.more]


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "blocks are quiet when their receive has ended": changed(Book, "_heard", quiet_at_its_end),
    "the end of another transfer of the request counts": (Book, "_heard", any_transfer),
    "an end that overtakes the answer is forgotten": (Book, "_receive_answered", not_early),
    "a publish is sent again that was aborted": (Book, "_publish_answered", without_more),
    "a publish is sent again that older weights have computed": (Book, "_publish_answered", by_new_weights),
    "the name of weights that nobody waits for is not sent": (Book, "_leave", refused),
    "what waits while the weights are replaced is not cut": (values, "in_part", what_is_taken),
    "what arrives when the weights were replaced is taken": (Book, "_heard", any_weights),
    "a receive that is given up is not aborted": (Book, "_given_up", no_effects),
    "the next receive does not wait for the one that is given up": (Book, "_go", not_waited_for),
    "a receive that waits is forgotten": (Book, "_free", unaborted),
    "what waits for the registration is forgotten": (Book, "_go_on", no_effects),
    "a call that nobody waits for is told its end": changed(Book, "_tell", without(e.Quiet)),
    "a publish that nobody waits for is not withdrawn": changed(Book, "_leave", without(e.SendAbort)),
    "a publish that is refused leaves its lease": (Book, "_forget", at_the_end),
    "a lost session is quiet at once": changed(Book, "_lose", at_once),
    "calls are not told that the session is lost": changed(Book, "_lose", without(e.Doubtful)),
    "a lost lease is not told to the next daemon": changed(Book, "_lose", forgotten),
    "leases are not told that the session is over": changed(Book, "_settle", without(e.LeaseEnded)),
    "calls are not quiet when the session is over": changed(Book, "_settle", without(e.Quiet)),
    "a lease ends twice": changed(Book, "on", twice),
    "leases are numbered anew in another session": changed(Book, "_settle", same_numbers),
    "an abort leaves what was not sent": (Book, "_drop", no_effects),
    "nothing is forgotten of a lease that has ended": (Book, "_forget", nothing),
}
