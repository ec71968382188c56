"""`hetero certs`: what it writes, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero import cli
from hetero.errors import ConfigError, ExitCode
from hetero.wire.certificates import make_certificates
from hetero.wire.tls import Tls


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_certs_of_named_hosts_are_there_for_their_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "certs"
    assert cli.main(["certs", str(folder), "--host", "algo-1", "--host", "10.0.0.7", "--days", "3"]) == ExitCode.OK
    assert names(folder) == ["10.0.0.7.key", "10.0.0.7.pem", "algo-1.key", "algo-1.pem", "ca.pem"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().out == f"wrote certificates of 2 hosts to {folder}; they expire in 3 days\n"
    for host in ("algo-1", "10.0.0.7"):
        assert Tls(folder, host).host == host


def test_certs_of_a_cluster_file_are_those_of_all_its_hosts(tmp_path: Path) -> None:
    groups = [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["node-10", "node-9"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["node-1"]},
    ]
    cluster_file = tmp_path / "cluster.json"
    cluster_file.write_text(json.dumps({"instance_groups": groups}))
    folder = tmp_path / "certs"
    assert cli.main(["certs", str(folder), "--cluster-file", str(cluster_file)]) == ExitCode.OK
    assert [name for name in names(folder) if name.endswith(".key")] == ["node-1.key", "node-10.key", "node-9.key"]


def test_key_of_the_authority_is_kept_only_if_asked(tmp_path: Path) -> None:
    assert cli.main(["certs", str(tmp_path / "a"), "--host", "algo-1", "--keep-ca-key"]) == ExitCode.OK
    assert (tmp_path / "a" / "ca.key").stat().st_mode & 0o777 == 0o600
    make_certificates(tmp_path / "b", ["algo-1"])
    assert not (tmp_path / "b" / "ca.key").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_certificates_are_strict_and_of_this_host_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["algo-1"], days=2)
    command = ["openssl", "verify", "-x509_strict", "-CAfile", tmp_path / "ca.pem", tmp_path / "algo-1.pem"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    text = subprocess.check_output(["openssl", "x509", "-in", tmp_path / "algo-1.pem", "-noout", "-text"], text=True)
    assert "DNS:algo-1\n" in text
    assert "CA:FALSE" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--host NAME for each host, or --cluster-file FILE"),
        (["--host", "../x"], "'../x' is not a host name"),
        (["--host", "a\nsubjectAltName=DNS:b"], "is not a host name"),
        (["--host", "ca"], "'ca' is not a host name"),
        (["--host", "a", "--host", "a"], "given twice"),
        (["--host", "a", "--days", "0"], "--days"),
        (["--host", "a", "--days", "9999"], "expected 1 to 825"),
        (["--host", "a", "--days", "-1"], "--days"),
    ],
)
def test_certs_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(["certs", str(tmp_path / "certs"), *arguments]) == ExitCode.USAGE
    assert words in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_certs_never_overwrite(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["algo-1"])
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match="holds ca.pem already"):
        make_certificates(tmp_path, ["algo-2"])
    assert (tmp_path / "ca.pem").read_bytes() == before
    assert names(tmp_path) == ["algo-1.key", "algo-1.pem", "ca.pem"]


def test_certs_without_cryptography_say_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r'pip install "hetero\[tls\]"'):
        make_certificates(tmp_path / "certs", ["algo-1"])
    assert not (tmp_path / "certs").exists()


def test_certs_are_made_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert cli.main(["certs", str(tmp_path), "--host", "algo-1"]) == ExitCode.OK
    assert names(tmp_path) == ["algo-1.key", "algo-1.pem", "ca.pem"]


def test_certs_in_a_folder_that_cannot_be_written_to_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certs", "/proc", "--host", "algo-1"]) == ExitCode.USAGE
    assert "cannot make the folder /proc, or files in it" in capsys.readouterr().err


_STOPS_AT_THE_FIRST_MOVE = """
import os, signal, sys
from pathlib import Path
from hetero.wire.certificates import make_certificates
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
make_certificates(Path(sys.argv[1]), ["algo-1"])
"""


def test_killed_call_leaves_no_file_in_its_place_and_the_next_one_removes_the_rest(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _STOPS_AT_THE_FIRST_MOVE, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    (scratch,) = tmp_path.iterdir()
    assert scratch.name.startswith(".certificates-")
    assert names(scratch) == ["algo-1.key", "algo-1.pem", "ca.pem"]
    make_certificates(tmp_path, ["algo-1"])
    assert names(tmp_path) == ["algo-1.key", "algo-1.pem", "ca.pem"]
