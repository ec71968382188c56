"""The token that came with a job's code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.control.security import TOKEN_FILE_VARIABLE, Token
from hetero.errors import AuthenticationError
from hetero.launch.job_token import STAGED_FOLDER, TOKEN_NAME, job_token, staged_token

SECRET = "staged-secret-0123456789"

_HOST = """
import os, sys
from pathlib import Path
from hetero.cluster import find_platform
from hetero.config import LaunchOptions
from hetero.launch.host import LaunchedHost
from hetero.launch.ranks.ranks import AgentStarter
starter = AgentStarter("torch")
platform = find_platform({}, cluster_file="cluster.json")
cluster = platform.read_cluster(host="127.0.0.1")
options = LaunchOptions(script=sys.argv[0], port=17808, require_token=True)
with LaunchedHost(options, cluster, platform=platform, environ={}, starter=starter) as host:
    print(Path(host.child_environment["HETERO_TOKEN_FILE"]).read_text())
"""


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    """Return a folder as in a container of SDK 3, where every user can read the file."""
    path = tmp_path / STAGED_FOLDER / TOKEN_NAME
    path.parent.mkdir()
    path.write_text(f"{SECRET}\n")
    path.chmod(0o644)
    return tmp_path


def test_token_that_came_with_the_code_is_used_although_its_mode_was_lost(code_dir: Path) -> None:
    token = job_token({}, code_dir, is_required=True)
    assert token is not None
    assert token.reveal() == SECRET


def test_token_that_the_environment_names_comes_first(code_dir: Path) -> None:
    path = code_dir / "own"
    path.write_text("another-secret-0123456789")
    path.chmod(0o600)
    assert job_token({TOKEN_FILE_VARIABLE: str(path)}, code_dir, is_required=True) == Token("another-secret-0123456789")


def test_job_without_any_token_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert job_token({}, tmp_path, is_required=False) is None
    assert "the job has no token" in caplog.text
    with pytest.raises(AuthenticationError, match="the job's token is missing\n  Set HETERO_TOKEN_FILE"):
        job_token({}, tmp_path, is_required=True)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"with a space in the middle of it"])
def test_file_that_holds_no_token_is_an_error_that_does_not_quote_it(code_dir: Path, content: bytes) -> None:
    (code_dir / STAGED_FOLDER / TOKEN_NAME).write_bytes(content)
    with pytest.raises(AuthenticationError, match="holds no token.*\n.*prepare the estimator again") as caught:
        staged_token(code_dir)
    assert content == b"" or content.decode("latin-1") not in str(caught.value)


def test_token_that_cannot_be_read_is_an_error(code_dir: Path) -> None:
    path = code_dir / STAGED_FOLDER / TOKEN_NAME
    path.unlink()
    path.mkdir()
    with pytest.raises(AuthenticationError, match="cannot read the token .*: Is a directory"):
        staged_token(code_dir)


def test_launcher_hands_the_token_of_its_code_to_its_ranks(code_dir: Path) -> None:
    group = {"instance_group_name": "dnn", "instance_type": "ml.p3.2xlarge", "hosts": ["127.0.0.1"]}
    (code_dir / "cluster.json").write_text(json.dumps({"instance_groups": [group]}))
    script = code_dir / "host.py"
    script.write_text(_HOST)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=code_dir,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout.strip() == SECRET, done.stderr
