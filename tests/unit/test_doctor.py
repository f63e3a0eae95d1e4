"""`kvferry doctor` and `serve --check`: what is wrong is found and has a remedy, on any machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvferryd.commands.cli import main
from kvferryd.commands.doctor import CHECK, CHECKS, ports
from kvferryd.config import OPTIONS
from kvferryd.peers.certificates import is_for

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
NO_GPU = not list(Path("/dev").glob("nvidia[0-9]*"))


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*OPTIONS, "config"):
        monkeypatch.delenv(f"KVFERRY_{name.upper()}", raising=False)
    monkeypatch.setenv("KVFERRY_ENGINE_SOCKET", str(tmp_path / "engine.sock"))
    monkeypatch.setenv("KVFERRY_REST", "127.0.0.1:9")  # nobody's


def found(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit status, and what is wrong or to be known, by check."""
    status = main(["doctor", "--json", *flags])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is (status == 0)
    by_check: dict[str, list[dict[str, Any]]] = {}
    for each in told["findings"]:
        by_check.setdefault(each["check"], []).append(each)
    return status, by_check


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_a_machine_without_a_gpu_is_fine_for_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = found(capsys)
    assert status == 0
    assert "no GPU is needed" in told["gpu"][0]["what"]
    assert "tcp/lo" in told["transports"][0]["what"]  # UCX really opened it
    assert {"ipc", "claim", "pid_namespace", "rdma", "memlock", "handles", "roster"} <= told.keys()


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_wrong_and_has_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    status, told = found(capsys, "--device", "cuda:0")
    assert status == 1
    assert [told[name][0]["level"] for name in ("gpu", "claim")] == ["wrong", "wrong"]
    assert "ResourceClaim" in told["claim"][0]["remedy"]
    assert told["gpu"][0]["remedy"]


def test_it_reads_for_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--roster", "10.0.0.1:7411"]) == 1
    said = capsys.readouterr().out
    assert "wrong  roster" in said
    assert "-> add it to allow_peers, on the daemons of all ranks" in said
    assert said.endswith("see above for what to do\n")


def test_transports_that_ucx_cannot_open_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = found(capsys, "--ucx", "TLS=nonsense")
    assert (status, told["transports"][0]["level"]) == (1, "wrong")


def test_wrong_settings_are_findings(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = found(capsys, "--way", "quick", "--arena-mb", "many")
    assert (status, set(told)) == (1, {"setting way", "setting arena_mb"})


@pytest.mark.parametrize(("days", "level"), [(3, "note"), (-3, "wrong"), (300, "")])
def test_certificates_that_expire_are_told_in_time(
    days: int, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    own = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "daemon")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(own.public_key()).serial_number(1)
        .not_valid_before(now - timedelta(days=30)).not_valid_after(now + timedelta(days=days, hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(own, hashes.SHA256())
    )  # fmt: skip
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(own.private_bytes(pem, plain, serialization.NoEncryption()))
    _, told = found(capsys, "--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(cert))
    assert {each["level"] for each in told.get("certificates", [])} == ({level} if level else set())


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the openssl commands of docs/operations.md were run."""
    (recipe,) = re.findall(r"```sh\n(openssl req -x509.*?)```", OPERATIONS.read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("issued")
    subprocess.run(["sh", "-e", "-c", recipe], cwd=folder, check=True, capture_output=True)
    return folder


def tls(folder: Path, host: str, authority: str = "ca.pem") -> tuple[str, ...]:
    files = {"cert": f"{host}.pem", "key": f"{host}.key", "ca": authority}
    return tuple(part for kind, file in files.items() for part in (f"--tls-{kind}", str(folder / file)))


def test_certificates_of_the_recipe_are_right(issued: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = found(capsys, *tls(issued, "10.0.0.7"), "--advertise", "10.0.0.7:7411", "--allow-peers", "10.0.0.0/8")
    assert "certificates" not in told


def test_a_certificate_for_another_name_than_is_advertised_is_wrong(
    issued: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = found(capsys, *tls(issued, "10.0.0.7"), "--advertise", "10.0.0.8:7411", "--allow-peers", "10.0.0.0/8")
    (said,) = told["certificates"]
    assert said["level"] == "wrong"
    assert said["what"].endswith("10.0.0.7.pem is for 10.0.0.7, and peers dial 10.0.0.8, the host of advertise")
    assert "subjectAltName IP:10.0.0.8" in said["remedy"]


def test_a_certificate_of_another_authority_than_tls_ca_is_wrong(
    issued: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tls(issued, "10.0.0.7", "10.0.0.8.pem")
    said = checked(capsys, *files, "--advertise", "10.0.0.7:7411", "--allow-peers", "10.0.0.0/8")
    assert f"no authority in {issued}/10.0.0.8.pem has signed {issued}/10.0.0.7.pem" in said


@pytest.mark.parametrize(
    ("host", "names", "answer"),
    [
        ("decode-0.peers.svc", ["*.peers.svc"], True), ("a.decode-0.peers.svc", ["*.peers.svc"], False),
        ("peers.svc", ["*.peers.svc"], False), ("Decode.svc", ["decode.SVC"], True),
        ("10.0.0.7", ["10.0.0.8", "10.0.0.7"], True), ("fd00:0:0:0::7", ["fd00::7"], True),
        ("FD00::7", ["fd00:0::7"], True), ("fd00::8", ["fd00::7"], False),
    ],
)  # fmt: skip
def test_a_wildcard_stands_for_one_label(host: str, names: list[str], answer: bool) -> None:
    assert is_for(host, names) is answer


# serve --check


def checked(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The words of a failing check on stderr."""
    assert (
        main(
            ["serve", "--check", "--rest", "127.0.0.1:0", "--peer", "127.0.0.1:0", "--advertise", "127.0.0.1:9", *flags]
        )
        == 2
    )
    captured = capsys.readouterr()
    assert "arena_mb" in captured.out  # the settings are shown all the same
    return captured.err


def test_check_finds_a_roster_that_allow_peers_does_not_admit(capsys: pytest.CaptureFixture[str]) -> None:
    assert "roster = 10.0.0.1:7411 is not in allow_peers" in checked(capsys, "--roster", "10.0.0.1:7411")


def test_check_finds_a_misspelt_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_ROSTR", "10.0.0.1:7411")
    assert "nothing reads the variable KVFERRY_ROSTR -> did you mean KVFERRY_ROSTER?" in checked(capsys)


def test_check_finds_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = checked(capsys, "--engine-socket", str(tmp_path / "file" / "engine.sock"))
    assert "file is no folder this user may write to" in said


def test_check_finds_a_node_dir_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "node is no folder that this user may write to" in checked(capsys, "--node-dir", str(tmp_path / "node"))


@pytest.mark.parametrize("name", ["rest", "peer"])
def test_check_finds_a_port_in_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"nothing can listen on {name} = {address}" in checked(capsys, f"--{name}", address)


def test_check_finds_another_daemon_at_the_engine_socket(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "engine.sock"))
        other.listen()
        assert "another daemon serves engine_socket" in checked(capsys)


def test_check_finds_a_missing_package() -> None:
    """In an interpreter that has none of them."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'nixl', 'nixl_cu12', 'nixl_cu13']));"
        "from kvferryd.commands.cli import main; sys.exit(main(['serve', '--check']))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the package fastapi is not installed -> pip install 'kvferry[daemon]'" in done.stderr
    assert "NIXL is not installed" in done.stderr and "pip install --no-deps nixl-cu13" in done.stderr


def test_every_check_that_serve_makes_but_ports_is_made_by_doctor() -> None:
    assert set(CHECK) - set(CHECKS) == {ports}  # which a daemon that runs has taken
