"""The protos: what `buf` says of them, the enums beside the words that they had first, and the committed stubs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry.v1
from kvferry.schemas import LeaseState, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import LEASE_STATES, PATHS, TRANSFER_STATES
from kvferryd.config import OPTIONS
from kvferryd.paths.move import PathName

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
BUF = Path(sys.executable).with_name("buf")


def lint(folder: Path) -> str:
    return subprocess.run([BUF, "lint", str(folder)], capture_output=True, text=True, timeout=240).stdout


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed (pip install buf-bin)")
def test_buf_has_no_complaint(tmp_path: Path) -> None:
    assert lint(PROTO) == ""
    for path in PROTO.rglob("*.*"):
        copy = tmp_path / path.relative_to(PROTO)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("PATH_STAGED", "STAGED"))
    assert 'should be prefixed with "PATH_"' in lint(tmp_path)


@pytest.mark.parametrize("file", [engine_pb2, layout_pb2, peer_pb2])
def test_every_file_says_where_its_go_code_belongs(file: object) -> None:
    package = file.DESCRIPTOR.GetOptions().go_package  # type: ignore[attr-defined]
    assert package == "github.com/kvferry/kvferry/gen/go/kvferry/v1;kvferryv1"


def test_every_state_and_path_has_its_enum_and_no_enum_has_more() -> None:
    assert sorted(TRANSFER_STATES.values()) == sorted(layout_pb2.TransferState.values())[1:]
    assert sorted(LEASE_STATES.values()) == sorted(layout_pb2.LeaseState.values())[1:]
    assert set(PATHS) == {*PathName, "unspecified"}
    assert TRANSFER_STATES[TransferState.DONE] == layout_pb2.TRANSFER_STATE_DONE
    assert LEASE_STATES[LeaseState.EXPIRED] == layout_pb2.LEASE_STATE_EXPIRED
    assert PATHS["mapped"] == layout_pb2.PATH_MAPPED


def test_the_page_of_the_protocol_names_no_field_that_is_gone() -> None:
    """The two services; beside fields it names codes of errors and settings."""
    page, files = (ROOT / "docs" / "protocol.md").read_text(), (engine_pb2, layout_pb2, peer_pb2)
    services = page.partition("## Engine service")[2].partition("## Refusals")[0]
    named = {name.rpartition(".")[2] for name in re.findall(r"`([a-z][\w.]*)`", services)}
    there = {
        field.name for file in files for each in file.DESCRIPTOR.message_types_by_name.values() for field in each.fields
    }
    codes = set(re.findall(r'<a id="(\w+)">', (ROOT / "docs" / "reference" / "errors.md").read_text()))
    assert {"lease", "attempt", "lease_ended", "allow_peers"} <= named
    assert named - there - codes - OPTIONS.keys() == set()


# ---- the committed stubs ----


GENERATE = Path(__file__).parent.parent / "generate_stubs.py"


def test_the_committed_stubs_equal_a_fresh_generation(tmp_path: Path) -> None:
    subprocess.run([sys.executable, GENERATE, tmp_path], check=True, timeout=60)
    fresh = {path.name: path.read_text() for path in (tmp_path / "kvferry/v1").iterdir() if path.is_file()}
    folder = Path(kvferry.v1.__file__).parent
    committed = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert committed.keys() == fresh.keys()
    for name, text in fresh.items():
        assert committed[name] == text, f"{name} is out of date: make proto"
