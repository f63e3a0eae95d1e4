"""The path of the engine socket: what a killed daemon left is removed, and nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvferry.errors import KvferryError
from kvferryd.process.serve import _claim


def refused(path: Path) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        _claim(path)
    assert (caught.value.code, caught.value.field, caught.value.value) == ("bad_config", "engine_socket", str(path))
    assert caught.value.remedy
    return caught.value


def test_a_folder_is_made_for_it(tmp_path: Path) -> None:
    _claim(tmp_path / "run" / "kvferry" / "s")
    assert list((tmp_path / "run" / "kvferry").iterdir()) == []


def test_a_socket_that_nobody_serves_any_more_is_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    _claim(tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_somebody_serves_stays(kind: socket.SocketKind, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, kind) as served:
        served.bind(str(tmp_path / "s"))
        if kind is socket.SOCK_STREAM:
            served.listen()
        refused(tmp_path / "s")
        assert (tmp_path / "s").exists()


def test_a_file_a_folder_and_a_link_stay(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("precious")
    folder.mkdir()
    link.symlink_to(file)
    for path in (file, folder, link):
        assert "no socket" in refused(path).message
    assert file.read_text() == "precious"
    assert folder.is_dir()
    assert link.is_symlink()
