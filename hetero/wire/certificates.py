"""Makes the certificates of one job with the package ``cryptography``.

These are an authority, and a key and a certificate for each host.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.errors import ConfigError
from hetero.system.workdir import private_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, ExtensionType

__all__ = ["DEFAULT_DAYS", "make_certificates"]

DEFAULT_DAYS = 30
_MAX_DAYS = 825
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}")
# Certificates become valid this long before now, because the hosts' clocks differ.
_EARLIER = dt.timedelta(hours=1)
_SCRATCH_PREFIX = ".certificates-"


def make_certificates(
    folder: Path, hosts: Sequence[str], *, days: int = DEFAULT_DAYS, keep_authority_key: bool = False
) -> None:
    """Write ``ca.pem``, and ``HOST.pem`` and ``HOST.key`` for every host. By default, discard the authority's key.

    The files appear only when all of them have been made. Only this user can read them. The authority's key is written
    to a disk only with ``keep_authority_key``. If a call is killed, it may leave a scratch folder behind. The next call
    removes this folder if the file system has locks.

    Args:
        folder: The folder for the files. It is made if it does not exist.
        hosts: Names of the hosts as in the description of the cluster.
        days: Days until the certificates expire, 1 to 825.
        keep_authority_key: Whether to write ``ca.key`` as well. With this key, anyone can join the job.

    Raises:
        ConfigError: If cryptography is not installed, if a host's name or ``days`` is invalid, if a file exists
            already, or if the folder cannot be written to or be restricted to this user.
    """
    # Check the arguments.
    if not 1 <= days <= _MAX_DAYS:
        raise ConfigError(f"--days is {days}; expected 1 to {_MAX_DAYS}")
    names = [f"{host}.{kind}" for host in hosts for kind in ("pem", "key")]
    _check(folder, hosts, ["ca.pem", *names])
    # Make everything in memory before the first file is written. In an earlier version, a call that was killed
    # midway left the authority's key in its scratch folder.
    now = dt.datetime.now(dt.timezone.utc)
    begin, end = now - _EARLIER, now + dt.timedelta(days=days)
    authority = _Authority.new(begin, end)
    made = {"ca.pem": _pem(authority.certificate)}
    if keep_authority_key:
        made["ca.key"] = _pem(authority.key)
    for host in hosts:
        key, certificate = authority.issue(host, begin, end)
        made |= {f"{host}.pem": _pem(certificate), f"{host}.key": _pem(key)}
    # Write the files into a private scratch folder, and move them when all of them exist.
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = stack.enter_context(private_folder(_SCRATCH_PREFIX, parent=str(folder)))
            for name, content in made.items():
                # Make the file with its final mode. A file that is restricted later is open to others for a moment.
                with open(scratch / name, "xb", opener=_open_private) as file:
                    file.write(content)
            for name in made:
                (scratch / name).replace(folder / name)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot make the folder {folder}, or files in it: {why}") from error


def _check(folder: Path, hosts: Sequence[str], names: Sequence[str]) -> None:
    """Reject invalid or repeated host names, and files that exist already."""
    if not hosts:
        raise ConfigError("no host is given: pass --host NAME for each host, or --cluster-file FILE")
    for host in hosts:
        # A host of the name "ca" would overwrite the files of the authority.
        if not _HOST_NAME.fullmatch(host) or host == "ca":
            raise ConfigError(f"--host {host[:80]!r} is not a host name: expected letters, digits and ._:-, and not ca")
    if len(set(hosts)) < len(hosts):
        raise ConfigError("a host is given twice; give each one once")
    # Look for ca.key too, even if it will not be written, because it belongs to another authority.
    taken = [name for name in (*names, "ca.key") if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{folder} holds {taken[0]} already; give another folder, or remove the old certificates")


@dataclass(frozen=True, slots=True)
class _Authority:
    """The key that signs the certificates of a job's hosts, and its own certificate."""

    key: EllipticCurvePrivateKey
    certificate: Certificate

    @classmethod
    def new(cls, begin: dt.datetime, end: dt.datetime) -> _Authority:
        """Make an authority.

        Raises:
            ConfigError: If cryptography is not installed.
        """
        try:
            from cryptography import x509
        except ImportError as error:
            raise ConfigError(
                'certificates are made with cryptography, which is not installed; pip install "hetero[tls]", or make '
                "them elsewhere:\n  ca.pem, and HOST.pem and HOST.key for every host, its name as subjectAltName"
            ) from error
        key = _new_key()
        # Each extension, and whether it is critical. ``path_length=0``: no other authority below this one.
        extensions: list[tuple[ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(signs_certificates=True), True),
        ]
        # The authority signs its own certificate.
        signed = _signed(
            "hetero job", key, issuer="hetero job", issuer_key=key, begin=begin, end=end, extensions=extensions
        )
        return cls(key, signed)

    def issue(self, host: str, begin: dt.datetime, end: dt.datetime) -> tuple[EllipticCurvePrivateKey, Certificate]:
        """Return the key and the certificate of a host."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = _new_key()
        # A host both accepts and opens connections.
        both_sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        # A certificate has another field for an address than for a name.
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        # Each extension, and whether it is critical.
        extensions: list[tuple[ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs_certificates=False), True),
            (both_sides, False),
            (x509.SubjectAlternativeName([name]), False),
            # A strict check, such as `openssl verify -x509_strict`, needs the id of the key that signed.
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False),
        ]
        signed = _signed(
            "hetero host", key, issuer="hetero job", issuer_key=self.key, begin=begin, end=end, extensions=extensions
        )
        return key, signed


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _usage(*, signs_certificates: bool) -> ExtensionType:
    """Return the extension with the purpose of a key: to sign certificates, or to sign handshakes."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    subject: str,
    key: EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: EllipticCurvePrivateKey,
    begin: dt.datetime,
    end: dt.datetime,
    extensions: Sequence[tuple[ExtensionType, bool]],
) -> Certificate:
    """Return a signed certificate of a key. Each extension has a flag: whether it is critical."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    builder = (
        x509.CertificateBuilder(subject_name=named(subject), issuer_name=named(issuer), public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(issuer_key, SHA256())


def _pem(content: EllipticCurvePrivateKey | Certificate) -> bytes:
    """Return a key or a certificate in PEM format, as it is written to a file."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509 import Certificate

    if isinstance(content, Certificate):
        return content.public_bytes(Encoding.PEM)
    return content.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
