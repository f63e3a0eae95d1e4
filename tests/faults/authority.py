"""Certificates as a test wants them: of this authority or that, for this name, run out or not."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)
YEAR, DAY = datetime.timedelta(days=365), datetime.timedelta(days=1)


class Authority:
    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = _pem(_signed(self._name, self._name, self._key, self._key, NOW + YEAR, ()))

    def issue(self, *names: str, until: datetime.datetime = NOW + YEAR) -> tuple[bytes, bytes]:
        """(certificate, private key), both PEM. names: IP addresses or host names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return _pem(_signed(self._name, subject, self._key, key, until, names)), private


def _signed(
    issuer: x509.Name,
    subject: x509.Name,
    signing: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
    until: datetime.datetime,
    names: tuple[str, ...],
) -> x509.Certificate:
    begins = min(NOW, until) - DAY
    made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), begins, until)
    made = made.add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
    if names:
        made = made.add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
    return made.sign(signing, hashes.SHA256())


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def replace(file: Path, content: bytes) -> None:
    """Written whole, as Kubernetes and every careful hand do it."""
    beside = file.with_suffix(".new")
    beside.write_bytes(content)
    os.replace(beside, file)
