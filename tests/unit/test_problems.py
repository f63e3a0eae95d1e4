"""An error's kind decides its HTTP status and its gRPC status, and survives the wire."""

from __future__ import annotations

import os
import resource

import grpc
import pytest

from kvferry.errors import CLASSES, Kind
from kvferry.file import File
from kvferry.manifest import ManifestError
from kvferry.wire import problem_from_proto, problem_to_proto
from kvferryd.api.answer import told
from kvferryd.api.rest.problems import problem

STATUSES = {
    Kind.MALFORMED: 422, Kind.UNAUTHORIZED: 401, Kind.FORBIDDEN: 403, Kind.NOT_FOUND: 404, Kind.CONFLICT: 409,
    Kind.FULL: 429, Kind.INTERNAL: 500, Kind.PEER_FAILED: 502, Kind.UNAVAILABLE: 503, Kind.DEADLINE: 504,
}  # fmt: skip


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_has_its_statuses_here_and_where_it_arrives(kind: Kind) -> None:
    raised = CLASSES[kind]("some_code", "some message")
    arrived = problem_from_proto(problem_to_proto(raised))
    assert (type(arrived), arrived.code) == (type(raised), "some_code")
    for error in (raised, arrived):
        assert problem(error).status_code == STATUSES[kind]
        assert grpc.StatusCode[error.kind.grpc] is not grpc.StatusCode.UNKNOWN


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
