"""deploy/systemd: systemd understands the unit, and the unit gives a daemon what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.descriptors import DESCRIPTORS
from kvferryd.config import Config

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvferry@.service"
INSTALLED = "/opt/kvferry/bin/kvferry"


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def faults(text: str) -> Iterator[str]:
    unit = settings(text)
    drain_s = Config().drain_timeout_s
    if unit.get("Type") != ["notify"]:
        yield "it counts as started before anybody can reach it"
    if unit.get("KillMode") != ["mixed"]:
        yield "a stop ends the daemon while it drains"
    if int(unit.get("TimeoutStopSec", ["90"])[0]) <= drain_s:
        yield "a stop takes less than a drain"
    if int(unit.get("LimitNOFILE", ["1024"])[0]) < DESCRIPTORS:
        yield "too few descriptors"
    if unit.get("LimitMEMLOCK") != ["infinity"]:
        yield "RDMA cannot register memory"
    if unit.get("ProtectHome") != ["tmpfs"]:
        yield "NIXL, which looks for a file in the user's home, may not look"
    if not any("HUP" in each for each in unit.get("ExecReload", ())):
        yield "a reload is no upgrade"
    if unit.get("ExecStart") != [f"{INSTALLED} keep --config /etc/kvferry/%i.toml"]:
        yield "no keeper, or not of the instance's settings"
    if "User" not in unit or unit.get("RuntimeDirectory") != ["kvferry/%i"]:
        yield "it runs as root, or has no folder for its socket"


def test_the_unit_gives_a_daemon_what_it_needs() -> None:
    assert list(faults(UNIT.read_text())) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("Type=notify", "it counts as started"),
        ("KillMode=mixed", "a stop ends the daemon"),
        ("TimeoutStopSec=330", "a stop takes less than a drain"),
        ("LimitNOFILE=65536", "too few descriptors"),
        ("LimitMEMLOCK=infinity", "RDMA cannot register"),
        ("ProtectHome=tmpfs", "may not look"),
        ("ExecReload=/bin/kill -HUP $MAINPID", "a reload is no upgrade"),
        ("User=kvferry", "it runs as root"),
    ],
)
def test_what_it_lacks_is_noticed(line: str, fault: str) -> None:
    text = UNIT.read_text()
    assert line in text
    assert any(fault in each for each in faults(text.replace(f"{line}\n", "")))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_it(tmp_path: Path) -> None:
    def verified(text: str) -> str:
        unit = tmp_path / "kvferry@prefill.service"
        unit.write_text(text.replace(INSTALLED, sys.executable))
        command = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return "\n".join(line for line in done.stderr.splitlines() if unit.name in line)

    assert verified(UNIT.read_text()) == ""
    assert "KillMod" in verified(UNIT.read_text().replace("KillMode", "KillMod")), "a misspelt word would be noticed"
