"""Certificate authorities and certificates of hosts, made for one test."""

import datetime
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates of hosts; its own is `folder/NAME-ca.pem`."""

    def __init__(self, folder: Path, name: str = "cluster") -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _subject(f"{name} CA")
        certificate = (
            _unsigned(self._subject, self._subject, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}-ca.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def environment(
        self, host: str = "host", *, trusted: "Authority | None" = None
    ) -> dict[str, str]:
        """Environment variables of TLS on a host: its own certificate, and `trusted`, else this
        authority, as the CA of the other hosts."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _unsigned(_subject(host), self._subject, key).sign(self._key, hashes.SHA256())
        stem = self._folder / f"{self._name}-{host}"
        stem.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        stem.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(stem.with_suffix(".crt")),
            "RAY_TLS_SERVER_KEY": str(stem.with_suffix(".key")),
            "RAY_TLS_CA_CERT": str((trusted or self).path),
        }


def set_variables(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
