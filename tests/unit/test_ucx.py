"""Uses of the network that UCX may make, where nobody says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferryd.config import Config
from kvferryd.transport import ucx


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_CMA_TX_QUOTA", "UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE", "UCX_TLS"):
        monkeypatch.setenv(name, "")  # writes of set_up are taken back after the test
        monkeypatch.delenv(name)


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two devices on this host, of which a container was given the second; it has two ports."""
    for number, device in enumerate(("mlx5_0", "mlx5_1")):
        verbs = tmp_path / "sys" / "infiniband_verbs" / f"uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{device}\n")
        for port in ("1", "2"):
            (tmp_path / "sys" / "infiniband" / device / "ports" / port).mkdir(parents=True)
    given = tmp_path / "dev"
    given.mkdir()
    (given / "uverbs1").touch()
    monkeypatch.setattr(ucx, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(ucx, "UVERBS", given)
    return given


def test_it_uses_the_interface_of_the_peer_port_and_the_rdma_devices_that_can_be_opened(rdma: Path) -> None:
    assert ucx.set_up(Config())["UCX_NET_DEVICES"] == "lo,mlx5_1:1,mlx5_1:2"


def test_a_device_that_left_meanwhile_is_not_named(rdma: Path) -> None:
    (rdma / "uverbs7").touch()
    assert ucx.set_up(Config())["UCX_NET_DEVICES"] == "lo,mlx5_1:1,mlx5_1:2"


def test_it_uses_all_where_no_interface_has_the_address() -> None:
    assert ucx.set_up(Config(peer="192.0.2.7:7411"))["UCX_NET_DEVICES"] == "all"


def test_what_an_operator_says_stays() -> None:
    assert ucx.set_up(Config(ucx={"NET_DEVICES": "mlx5_9:1"}))["UCX_NET_DEVICES"] == "mlx5_9:1"
    assert ucx.set_up(Config(ucx={"TLS": "rc,sm"})) == {}
    assert os.environ["UCX_CMA_TX_QUOTA"] == "64"
    ucx.set_up(Config(ucx={"TLS": "rc,sm", "CMA_TX_QUOTA": "3"}))
    assert os.environ["UCX_CMA_TX_QUOTA"] == "3"
