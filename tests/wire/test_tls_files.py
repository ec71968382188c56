"""A host's TLS files: those that cannot be used are named at the start, as are those that others could use."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.errors import AuthenticationError
from hetero.wire.tls import Tls
from tests.support.wire.job_certificates import folder, tls, unchecked


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a folder of the job's certificates to spoil."""
    for name in ("ca.pem", "algo-1.pem", "algo-1.key"):
        shutil.copy(folder("job") / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["ca.pem", "algo-1.pem", "algo-1.key"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b""), "is not a PEM file"),
        (lambda path: path.write_bytes(b"-----BEGIN CERTIFICATE-----\nnonsense\n"), "be used"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is not a PEM file"),
    ],
    ids=["missing", "empty", "nonsense", "folder", "fifo"],
)
def test_file_that_cannot_be_used_is_named(own: Path, name: str, spoil: Callable[[Path], object], words: str) -> None:
    spoil(own / name)
    with pytest.raises(AuthenticationError) as caught:
        Tls(own, "algo-1")
    assert words in str(caught.value)
    assert str(own) in str(caught.value)


def test_key_that_others_can_read_is_refused(own: Path) -> None:
    (own / "algo-1.key").chmod(0o640)
    with pytest.raises(AuthenticationError, match="mode 0640: others have access; chmod 600"):
        Tls(own, "algo-1")


@pytest.mark.attack("A18")
@pytest.mark.parametrize("name", ["ca.pem", "algo-1.pem"])
def test_certificate_that_others_can_write_is_refused(own: Path, name: str) -> None:
    (own / name).chmod(0o664)
    with pytest.raises(AuthenticationError, match="mode 0664: others can write it; chmod go-w"):
        Tls(own, "algo-1")


@pytest.mark.attack("A18")
@pytest.mark.parametrize("name", ["ca.pem", "algo-1.pem", "algo-1.key"])
def test_file_of_another_user_is_refused(own: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {(own / name).stat().st_ino: 4711}
    fstat = os.fstat

    def foreign(descriptor: int) -> object:
        facts = fstat(descriptor)
        return os.stat_result((*facts[:4], owners.get(facts.st_ino, facts.st_uid), *facts[5:]))

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(AuthenticationError, match="belongs to user 4711: expected this user or root"):
        Tls(own, "algo-1")


def test_key_with_a_password_is_refused_without_asking(own: Path) -> None:
    key = own / "algo-1.key"
    plain = own / "plain.key"
    key.rename(plain)
    subprocess.run(["openssl", "ec", "-in", plain, "-aes128", "-passout", "pass:x", "-out", key], check=True)
    key.chmod(0o600)
    with pytest.raises(AuthenticationError, match="cannot be used as a pair"):
        Tls(own, "algo-1")


@pytest.mark.attack("A18")
def test_own_certificate_that_the_others_would_refuse_is_refused_at_the_start(own: Path) -> None:
    with pytest.raises(AuthenticationError, match="certificate has expired"):
        Tls(folder("expired"), "algo-1")
    for kind in ("pem", "key"):
        shutil.copy(folder("job") / f"intruder.{kind}", own / f"algo-1.{kind}")
    with pytest.raises(AuthenticationError, match="Hostname mismatch"):
        Tls(own, "algo-1")
    shutil.copy(folder("other") / "ca.pem", own)
    with pytest.raises(AuthenticationError, match="another authority signed it"):
        Tls(own, "algo-1")
    shutil.copy(folder("job") / "algo-1.pem", own)
    with pytest.raises(AuthenticationError, match="cannot be used as a pair"):
        Tls(own, "algo-1")


def test_certificate_tells_when_it_ends() -> None:
    assert 43_200 < tls().expires_epoch_s - time.time() <= 86_400  # made for a day, early in this run of the tests
    with unchecked():
        assert Tls(folder("expired"), "algo-1").expires_epoch_s == 0.0
