"""The daemon's certificate, for every door that speaks TLS and for dialling: read again when the files have changed."""

from __future__ import annotations

import abc
import functools
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import grpc

from kvferry.tls import no_password
from kvferryd.config import Config, bad_config
from kvferryd.observe import logs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of the files at one time, checked to fit together."""

    certificate: bytes
    key: bytes
    authority: bytes
    name: str = ""
    """For which peers' certificates must be; empty: for the address that is dialled."""
    expires: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Unix time at which the certificates end, by setting."""
    context: ssl.SSLContext | None = field(default=None, compare=False)
    """For a REST server, which asks its clients for certificates."""

    def vouches_for(self, shown: bytes) -> bool:
        """Whether a certificate that TLS has accepted before still leads to an authority of ours. shown: it and its
        chain. Time plays no part: who has let it run out is refused when he connects again."""
        return _leads_to(shown, self.authority)

    def for_dialling(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_serving(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authority)


@functools.lru_cache(1024)
def _leads_to(shown: bytes, authorities: bytes) -> bool:
    from cryptography import x509  # 60 ms, for who rotates
    from cryptography.exceptions import InvalidSignature

    def signed(one: x509.Certificate, by: x509.Certificate) -> bool:
        try:
            one.verify_directly_issued_by(by)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    try:
        at, *chain = x509.load_pem_x509_certificates(shown)
        roots = x509.load_pem_x509_certificates(authorities)
    except (ValueError, x509.InvalidVersion):
        return False
    while not any(at == root or signed(at, root) for root in roots):
        above = next((each for each in chain if signed(at, each)), None)
        if above is None:
            return False
        chain.remove(above)
        at = above
    return True


class Certificates(abc.ABC):
    """Files that do not fit together are logged, and the last ones that did stay in use. Any thread may ask."""

    def __init__(self, setting: str, remedy: str, *files: Path) -> None:
        """Raises KvferryError (`bad_config`) when the files cannot be used."""
        self._files, self._lock = files, threading.Lock()
        try:
            self._seen = self._stamps()
            self._current = self._read()
        except OSError as error:
            raise bad_config(setting, files[0], f"{setting} cannot be used: {error}", remedy) from None

    def current(self) -> Identity:
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps != self._seen:
                    self._seen = stamps  # first: files that do not fit are reported once
                    self._current = self._read()
                    log.info("certificates were read again", file=str(self._files[0]))
            except OSError as error:  # ssl.SSLError is one
                log.error("new certificates do not fit, the old ones stay", file=str(self._files[0]), reason=str(error))
            return self._current

    @abc.abstractmethod
    def _read(self) -> Identity:
        """Raises OSError."""

    def _stamps(self) -> list[tuple[int, int]]:
        return [(status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in self._files)]

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server: mutual TLS. New connections are served with what the files hold by then."""
        served = self.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            current = self.current()
            if current == served:
                return None
            served = current
            return current.for_serving()

        # The stubs leave out that None keeps the configuration.
        return grpc.dynamic_ssl_server_credentials(served.for_serving(), renewed, True)  # type: ignore[arg-type]


def expires_at(pem: bytes) -> datetime | None:
    """When the first certificate of a PEM file ends; None where it is of a kind that OpenSSL alone reads."""
    from cryptography import x509  # 60 ms, for who has certificates

    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc
    except (ValueError, x509.InvalidVersion):
        return None


def names_in(pem: bytes) -> list[str]:
    """The names and addresses that the first certificate of a PEM file is for; its common name, which nobody checks,
    where it has none."""
    from cryptography import x509  # 60 ms, for who has certificates

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        try:
            found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return [f"{str(each.value)!r} (by its common name)" for each in certificate.subject]
        names = found.get_values_for_type(x509.DNSName)
        return [*names, *map(str, found.get_values_for_type(x509.IPAddress))]
    except (ValueError, x509.InvalidVersion):
        return []


def is_for(host: str, names: Iterable[str]) -> bool:
    """Whether who dials this host takes a certificate for these names: the address or name itself, or a wildcard for
    a name's first label."""
    dialled = _address(host)
    if not isinstance(dialled, str):
        return any(_address(each) == dialled for each in names)
    behind = dialled.partition(".")[2]
    return any(each.lower() in (dialled, f"*.{behind}") for each in names)


def _address(host: str) -> IPv4Address | IPv6Address | str:
    """An address has several spellings, and a name two cases."""
    try:
        return ip_address(host)
    except ValueError:
        return host.lower()


class CertificateFiles(Certificates):
    """The tls_* files."""

    def __init__(self, certificate: Path, key: Path, authority: Path) -> None:
        remedy = "name a certificate, its own private key and the authority that signed it, all PEM, without a password"
        super().__init__("tls_cert", remedy, certificate, key, authority)

    @classmethod
    def of(cls, config: Config) -> CertificateFiles | None:
        """None where the settings name no certificate."""
        return cls(*config.tls) if config.tls else None

    def _read(self) -> Identity:
        certificate, key, authority = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key, no_password)
        context.load_verify_locations(authority)
        context.verify_mode = ssl.CERT_REQUIRED
        held = certificate.read_bytes(), key.read_bytes(), authority.read_bytes()
        expires = {"tls_cert": expires_at(held[0]), "tls_ca": expires_at(held[2])}
        return Identity(*held, expires={name: at.timestamp() for name, at in expires.items() if at}, context=context)
