"""Ports that fleets on one host give out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvferry.errors import KvferryError
from kvferryd.demo import fleet
from kvferryd.demo.fleet import HOST, Fleet


def test_no_two_fleets_give_out_one_port_though_nobody_listens_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        only = probe.getsockname()[1]
    monkeypatch.setattr(fleet, "PORTS", range(only, only + 1))
    first, second = Fleet(tmp_path / "first"), Fleet(tmp_path / "second")
    try:
        assert first.free_port() == only
        with pytest.raises(KvferryError, match="no port"):
            second.free_port()
        first.close()
        assert second.free_port() == only
    finally:
        first.close()
        second.close()
