"""Makes the certificates of one job with the ``openssl`` command: an authority, and a key and certificate per host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hetero.errors import ConfigError, HeteroError
from hetero.system.workdir import private_folder

__all__ = ["DEFAULT_DAYS", "make_certificates"]

DEFAULT_DAYS = 30
_MAX_DAYS = 825
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}")
_EARLIER = timedelta(hours=1)  # certificates become valid this long before now, because the hosts' clocks differ
_TIMEOUT_S = 60.0
_SCRATCH_PREFIX = ".certificates-"
_MAX_KEY_BYTES = 2**16
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

# This replaces the system's configuration. `openssl ca` is used because not every version of
# `openssl x509` can set the start date.
_CONFIG = """\
[ca]
default_ca = job
[job]
database = index.txt
new_certs_dir = .
certificate = ca.pem
private_key = {authority_key}
default_md = sha256
rand_serial = yes
unique_subject = no
policy = names
[names]
commonName = supplied
[req]
distinguished_name = names
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[host]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {name}
"""


def make_certificates(
    folder: Path,
    hosts: Sequence[str],
    *,
    days: int = DEFAULT_DAYS,
    keep_authority_key: bool = False,
    valid_from: datetime | None = None,
) -> None:
    """Write ``ca.pem``, and ``HOST.pem`` and ``HOST.key`` for every host. By default, discard the authority's key.

    The files appear only when all of them have been made. Only this user can read them. The authority's key is written
    to a disk only with ``keep_authority_key``. A killed call may leave a scratch folder behind, which the next call
    removes if the file system has locks.

    Args:
        folder: The folder for the files. It is made if it does not exist.
        hosts: Names of the hosts as in the description of the cluster.
        days: Days until the certificates expire, 1 to 825.
        keep_authority_key: Whether to write ``ca.key`` as well. With this key, anyone can join the job.
        valid_from: Start of the certificates' validity. The default is one hour ago.

    Raises:
        ConfigError: If openssl is not installed, if a host's name or ``days`` is invalid, if a file exists already, or
            if the folder cannot be written to or be restricted to this user.
        HeteroError: If openssl failed.
    """
    # Check the arguments.
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError(
            "the command openssl is not in the PATH; install it, or make the certificates elsewhere:\n"
            "  ca.pem, and HOST.pem and HOST.key for every host, its name as subjectAltName"
        )
    if not 1 <= days <= _MAX_DAYS:
        raise ConfigError(f"--days is {days}; expected 1 to {_MAX_DAYS}")
    names = [f"{host}.{kind}" for host in hosts for kind in ("pem", "key")]
    _check(folder, hosts, ["ca.pem", *names])
    # Make everything in a private scratch folder, and move the files when all of them exist.
    begin = datetime.now(timezone.utc) - _EARLIER if valid_from is None else valid_from
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = stack.enter_context(private_folder(_SCRATCH_PREFIX, parent=str(folder)))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot make the folder {folder}, or one in it: {why}") from error
        authority_key = os.memfd_create("hetero-ca-key", os.MFD_CLOEXEC)
        stack.callback(os.close, authority_key)
        maker = _Maker(openssl, scratch, authority_key, begin, begin + timedelta(days=days) + _EARLIER)
        maker.make_authority()
        for host in hosts:
            maker.make_host(host)
        kept = ["ca.pem", *(["ca.key"] if keep_authority_key else []), *names]
        if keep_authority_key:
            maker.save_authority_key()
        for name in kept:
            (scratch / name).replace(folder / name)


def _check(folder: Path, hosts: Sequence[str], names: Sequence[str]) -> None:
    if not hosts:
        raise ConfigError("no host is given: pass --host NAME for each host, or --cluster-file FILE")
    for host in hosts:
        if not _HOST_NAME.fullmatch(host) or host == "ca":
            raise ConfigError(f"--host {host[:80]!r} is not a host name: expected letters, digits and ._:-, and not ca")
    if len(set(hosts)) < len(hosts):
        raise ConfigError("a host is given twice; give each one once")
    taken = [name for name in (*names, "ca.key") if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{folder} holds {taken[0]} already; give another folder, or remove the old certificates")


class _Maker:
    """Runs openssl in a folder that other users cannot read."""

    def __init__(self, openssl: str, folder: Path, authority_key: int, begin: datetime, end: datetime) -> None:
        self._openssl = openssl
        self._folder = folder
        self._authority_key = authority_key
        self._authority_key_path = f"/proc/self/fd/{authority_key}"  # valid in openssl, which inherits the descriptor
        self._dates = [f"{when:%Y%m%d%H%M%SZ}" for when in (begin, end)]
        (folder / "index.txt").touch()

    def make_authority(self) -> None:
        """Make the authority's key in memory, and write ``ca.pem``."""
        key = self._authority_key_path
        self._make("ca", "hetero job", "authority", "DNS:unused", "-selfsign", "-keyfile", key, key=key)

    def save_authority_key(self) -> None:
        """Write ``ca.key``."""
        with open(self._folder / "ca.key", "xb", opener=_open_private) as file:
            file.write(os.pread(self._authority_key, _MAX_KEY_BYTES, 0))

    def make_host(self, host: str) -> None:
        """Make the key and certificate of a host."""
        self._make(host, "hetero host", "host", _alternative_name(host), key=f"{host}.key")

    def _make(self, name: str, subject: str, section: str, alternative_name: str, *flags: str, key: str) -> None:
        config = _CONFIG.format(name=alternative_name, authority_key=self._authority_key_path)
        (self._folder / "config").write_text(config, encoding="ascii")
        self._run("req", "-new", *_NEW_KEY, "-subj", f"/CN={subject}", "-keyout", key, "-out", f"{name}.csr")
        self._run(
            *("ca", "-batch", "-notext", *flags, "-extensions", section, "-in", f"{name}.csr", "-out", f"{name}.pem"),
            *("-startdate", self._dates[0], "-enddate", self._dates[1]),
        )

    def _run(self, command: str, *arguments: str) -> None:
        try:
            subprocess.run(
                [self._openssl, command, "-config", "config", *arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                umask=0o077,
                pass_fds=(self._authority_key,),
                check=True,
            )
        except subprocess.CalledProcessError as error:
            lines = "".join(f"\n    {line}" for line in error.stdout.decode(errors="replace").splitlines()[-10:])
            raise HeteroError(f"openssl {command} failed with status {error.returncode}{lines}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HeteroError(f"cannot run {self._openssl}: {error}") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"
