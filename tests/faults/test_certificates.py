"""The daemon's certificates: files that cannot be used say why, and two who ask at once get the same."""

from __future__ import annotations

import ssl
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from authority import Authority, replace
from cryptography.hazmat.primitives import serialization

from kvferryd.peers.certificates import CertificateFiles, Certificates, Identity, expires_at
from support import refused

OURS = Authority("ours")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    held = *OURS.issue("127.0.0.1"), OURS.certificate
    for name, content in zip(("cert", "key", "ca"), held, strict=True):
        replace(tmp_path / name, content)
    return tmp_path / "cert", tmp_path / "key", tmp_path / "ca"


def test_a_private_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: tuple[Path, Path, Path]) -> None:
    key = serialization.load_pem_private_key(files[1].read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with refused("bad_config") as caught:
        CertificateFiles(*files)
    assert "has a password" in caught.value.message


def test_who_asks_while_files_are_read_again_gets_what_they_hold_now(tmp_path: Path) -> None:
    reading, may_end = threading.Event(), threading.Event()
    may_end.set()

    class Slow(Certificates):
        def _read(self) -> Identity:
            reading.set()
            may_end.wait(60)
            return Identity(self._files[0].read_bytes(), b"", b"")

    file = tmp_path / "file"
    file.write_bytes(b"old")
    certificates = Slow("setting", "", file)
    reading.clear()
    may_end.clear()
    replace(file, b"new")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(certificates.current)
        assert reading.wait(60)
        second = threads.submit(certificates.current)
        wait([second], 0.2)  # it would answer with the old one
        may_end.set()
        assert [first.result(60).certificate, second.result(60).certificate] == [b"new", b"new"]


def test_a_certificate_of_a_version_that_nobody_uses_proves_nothing(files: tuple[Path, Path, Path]) -> None:
    identity = CertificateFiles(*files).current()
    assert identity.vouches_for(identity.certificate)
    der = ssl.PEM_cert_to_DER_cert(identity.certificate.decode())
    version = b"\xa0\x03\x02\x01"
    second = ssl.DER_cert_to_PEM_cert(der.replace(version + b"\x02", version + b"\x01", 1)).encode()
    assert not identity.vouches_for(second)
    assert expires_at(second) is None
