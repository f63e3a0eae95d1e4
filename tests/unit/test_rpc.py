"""The meaning of a failed call."""

from __future__ import annotations

import grpc
import pytest
from grpc import StatusCode

from kvferry.errors import KvferryError
from kvferry.rpc import PROBLEM_KEY, error_of
from kvferry.wire import problem_to_proto

ENDED = KvferryError("peer_lost", "the stream is over")


def failed(code: StatusCode, *problem: KvferryError) -> grpc.aio.AioRpcError:
    trailing = [(PROBLEM_KEY, problem_to_proto(each).SerializeToString()) for each in problem]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details="d")


@pytest.mark.parametrize(
    ("code", "meant"),
    [
        (StatusCode.UNAVAILABLE, "unreachable"),
        (StatusCode.DEADLINE_EXCEEDED, "deadline"),
        (StatusCode.UNIMPLEMENTED, "protocol"),
        (StatusCode.INTERNAL, "unreachable"),
        (StatusCode.CANCELLED, "unreachable"),
        (StatusCode.UNKNOWN, "unreachable"),
        (StatusCode.RESOURCE_EXHAUSTED, "rpc_failed"),
    ],
)
def test_a_call_that_fails_without_a_problem_is_told_by_its_status(code: StatusCode, meant: str) -> None:
    error = error_of(failed(code), "the daemon")
    assert error.code == meant
    assert "the daemon" in error.message


@pytest.mark.parametrize("code", [StatusCode.INTERNAL, StatusCode.CANCELLED, StatusCode.UNKNOWN])
def test_where_grpc_only_says_that_a_stream_is_over_it_has_ended(code: StatusCode) -> None:
    assert error_of(failed(code), "the daemon", ended=ENDED) is ENDED


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED])
def test_why_a_stream_failed_is_not_hidden_by_its_end(code: StatusCode) -> None:
    assert error_of(failed(code), "the daemon", ended=ENDED).code in ("unreachable", "rpc_failed")


@pytest.mark.parametrize("code", [StatusCode.INTERNAL, StatusCode.INVALID_ARGUMENT])
def test_what_the_other_side_says_comes_before_its_status(code: StatusCode) -> None:
    said = KvferryError("full", "no room", field="max_leases", value=5, remedy="wait")
    error = error_of(failed(code, said), "the daemon", ended=ENDED)
    assert (error.code, error.message, error.field, error.remedy) == ("full", "no room", "max_leases", "wait")
