"""Certificates and keys for a local Flower federation: an authority, a server, and one key for each node."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.storage.snapshot import write_private

DAYS = 365  # for which certificates are valid


def make_certificates(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key: the server's certificate is for loopback only.

    The authority's key is thrown away: nobody can make another certificate that its nodes would trust.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> make_certificates(folder)
        >>> sorted(p.name for p in folder.iterdir())
        ['ca.crt', 'server.key', 'server.pem']
    """
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coterie local authority")])
    root = _certificate(name, name, authority.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    named = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # sign certificates and lists
    signed = (
        root.add_extension(usage, critical=True).add_extension(named, critical=False).sign(authority, hashes.SHA256())
    )
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = (
        _certificate(own, name, server.public_key())
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(named), critical=False)
        .sign(authority, hashes.SHA256())
    )
    write_private(folder / "ca.crt", _public(signed))
    write_private(folder / "server.pem", _public(leaf))
    write_private(folder / "server.key", _private(server, serialization.PrivateFormat.PKCS8))


def make_node_key(path: Path) -> None:
    """Write a node's private key, and its public key beside it: an elliptic curve of NIST's in OpenSSH's format.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "site0"
        >>> make_node_key(path)
        >>> path.with_suffix(".pub").read_text().split()[0]
        'ecdsa-sha2-nistp384'
    """
    key = ec.generate_private_key(ec.SECP384R1())  # ed25519 is refused
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_private(path, _private(key, serialization.PrivateFormat.OpenSSH))
    write_private(path.with_suffix(".pub"), public.decode() + "\n")


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _public(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> str:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()
