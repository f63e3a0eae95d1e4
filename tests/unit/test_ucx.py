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


V4 = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	0109A8C0	0003	0	0	0	00000000	0	0	0
eth1	0000480A	00000000	0001	0	0	0	0000FFFF	0	0	0
eth1	0000490A	00000000	0201	0	0	0	0000FFFF	0	0	0
"""
V6 = """fd000000000000000000000000000000 40 {0} 00 0 00000100 00000001 00000000 00000001 eth1
{0} 00 {0} 00 0 ffffffff 00000001 00000000 00200200 lo
""".format("0" * 32)


@pytest.mark.parametrize(
    ("devices", "address", "routed"),
    [
        ("eth1", "10.72.3.4", True),
        ("eth1", "10.74.0.1", False),
        ("eth1", "10.73.0.1", False),  # such a route refuses
        ("eth0", "10.74.0.1", True),  # by the default route
        ("all", "10.74.0.1", True),
        ("mlx5_0:1,eth1", "fd00::7", True),
        ("eth1", "fd01::7", False),
        ("lo", "127.0.0.1", True),  # its own
        ("lo", "fd01::7", False),  # the kernel's route by which nothing goes
    ],
)
def test_ucx_has_a_way_by_a_route_of_its_interfaces_alone(
    monkeypatch: pytest.MonkeyPatch, devices: str, address: str, routed: bool
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    monkeypatch.setattr(ucx, "_lines", lambda path: (V6 if path.endswith("ipv6_route") else V4).splitlines())
    assert ucx.routed([address]) is routed
    assert ucx.routed([]) and ucx.routed(["eth0"]), "no address is told"
    assert ucx.routed(["192.0.2.1", address]) is (routed and devices in ("all", "eth0")), "it wants a way to each"
    assert ucx.routed(["127.0.0.1", address]) is routed, "every host has loopback"
