"""Peers that share a secret prove it by mutual TLS: its private key is derived from the secret, and is the authority.

Only holders of the secret can sign a certificate of that authority. So the secret is never sent, both sides prove it in
every connection, before any call, by a signature over this very connection; and what is sent is encrypted. A daemon's
own certificate is made anew at every start and whenever the file changes, and its key stays in memory.

For a rotation the file has two lines, the new secret and the one before. Both authorities are trusted then, and the new
one is signed by the old one as well: a daemon that knows only one of the two still finds a chain to it.
"""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from kvferryd.config.types import SHORTEST_SECRET, Wrong, secrets_in
from kvferryd.peers.certificates import Certificates, Identity

NAME = "kvferry-peer"
"""For which the certificates are: a daemon that knows the secret may have any address."""
ALWAYS = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""Clocks play no part: a secret holds until it is taken out of the file."""
CURVE = ec.SECP256R1()


class PeerSecret(Certificates):
    """The file's secrets as certificates. A file that makes no sense is logged, and the last one that did stays."""

    def __init__(self, file: Path) -> None:
        """Raises KvferryError (`bad_config`) when the file cannot be used."""
        super().__init__(
            "peer_secret_file", f"write a secret of {SHORTEST_SECRET} characters or more: openssl rand -hex 32", file
        )

    def _read(self) -> Identity:
        try:
            secrets = secrets_in(self._files[0])
        except Wrong as wrong:
            raise OSError(f"it {wrong}") from None
        authorities = [_derived(secret) for secret in secrets]
        roots = [_certificate(each, each, each.public_key()) for each in authorities]
        crossed = [_certificate(old, new, new.public_key()) for new, old in itertools.pairwise(authorities)]
        own = ec.generate_private_key(CURVE)
        leaf = _certificate(authorities[0], None, own.public_key())
        return Identity(_pem(leaf, *crossed), _key_pem(own), _pem(*roots), NAME)


def _derived(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """The authority's key. 48 bytes of HKDF: reduced to the curve's order, they are as good as evenly distributed."""
    drawn = int.from_bytes(HKDF(hashes.SHA256(), 48, salt=None, info=b"kvferry peer authority 1").derive(secret), "big")
    return ec.derive_private_key(1 + drawn % (CURVE.group_order - 1), CURVE)


def _certificate(
    signing: ec.EllipticCurvePrivateKey, authority: ec.EllipticCurvePrivateKey | None, key: ec.EllipticCurvePublicKey
) -> x509.Certificate:
    """A certificate of `key`, signed by `signing`: for an authority, or for a daemon where it is None."""
    subject = _name(authority) if authority is not None else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    builder = (
        x509.CertificateBuilder(_name(signing), subject, key, x509.random_serial_number(), *ALWAYS)
        .add_extension(x509.BasicConstraints(ca=authority is not None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    if authority is None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    return builder.sign(signing, hashes.SHA256())


def _name(authority: ec.EllipticCurvePrivateKey) -> x509.Name:
    """Different for every secret: a chain is looked for by names."""
    digest = x509.SubjectKeyIdentifier.from_public_key(authority.public_key()).digest
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{NAME} {digest.hex()}")])


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
