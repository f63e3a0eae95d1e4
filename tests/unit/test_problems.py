"""An error: its kind, and what that is over HTTP, gRPC and the wire; and the meaning of a call that fails."""

from __future__ import annotations

import ast
import os
import resource
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from kvferry.errors import CLASSES, Kind, KvferryError
from kvferry.file import File
from kvferry.manifest import ManifestError
from kvferry.rpc import PROBLEM_KEY, error_of
from kvferry.wire import problem_from_proto, problem_to_proto
from kvferryd.api.answer import told
from kvferryd.api.rest.problems import problem

STATUSES = {
    Kind.MALFORMED: 422, Kind.UNAUTHORIZED: 401, Kind.FORBIDDEN: 403, Kind.NOT_FOUND: 404, Kind.CONFLICT: 409,
    Kind.FULL: 429, Kind.INTERNAL: 500, Kind.PEER_FAILED: 502, Kind.UNAVAILABLE: 503, Kind.DEADLINE: 504,
}  # fmt: skip
ROOT = Path(__file__).parents[2]
ENDED = KvferryError("peer_lost", "the stream is over")


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_has_its_statuses_here_and_where_it_arrives(kind: Kind) -> None:
    raised = CLASSES[kind]("some_code", "some message")
    arrived = problem_from_proto(problem_to_proto(raised))
    assert set(CLASSES) == set(Kind)
    assert (type(arrived), arrived.code, arrived.kind) == (type(raised), "some_code", kind)
    for error in (raised, arrived):
        assert problem(error).status_code == STATUSES[kind]
        assert StatusCode[error.kind.grpc] is not StatusCode.UNKNOWN


def test_a_manifests_unknown_group_is_no_missing_resource() -> None:
    assert problem(ManifestError("unknown_group", "")).status_code == 422


def test_what_says_no_kind_is_a_fault() -> None:
    message = problem_to_proto(CLASSES[Kind.FULL]("full", ""))
    message.kind = 0  # type: ignore[assignment]
    assert problem_from_proto(message).kind is Kind.INTERNAL


def test_a_call_that_lacks_a_file_handle_names_the_limit_wherever_it_came() -> None:
    """Memory of a keeper that is adopted again, for example."""
    with File(os.open(os.devnull, os.O_RDONLY)) as file:
        limit, limits = file.fileno(), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="open files") as lacking:
                File.copies([file.fileno()])
            error = told(lacking.value, "Adopt")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (error.code, error.value, error.kind) == ("out_of_descriptors", str(limit), Kind.FULL)


def test_no_site_raises_the_base_class() -> None:
    """Its kind is a fault of ours."""
    found = []
    for path in (*(ROOT / "clients").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == KvferryError.__name__:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


# ---- a call that fails ----


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
