"""How SIGTERM reaches a launcher: process 1, and what stands between."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.doctor import Level
from hetero.doctor.signals import ProcessFacts, ancestry, judge
from tests.support.doctor import run_doctor, write_cluster

BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.execv(sys.argv[1], sys.argv[1:])
"""


def process(pid: int, command: str, **facts: bool) -> ProcessFacts:
    known: dict[str, Any] = {"catches": True, "ignores": False, "blocks": False, **facts}
    return ProcessFacts(pid=pid, command=tuple(command.split()), **known)


LAUNCHER = process(40, "python -m hetero.cli launch train.py")
CHAINS = [
    ([process(1, "python /opt/launcher.py")], Level.OK, "is process 1"),
    ([process(1, "tini -- hetero launch"), LAUNCHER], Level.OK, "is forwarded"),
    ([process(1, "/sbin/docker-init -- sh"), LAUNCHER], Level.OK, "is forwarded"),
    ([process(1, "/usr/lib/systemd/systemd"), process(9, "bash"), LAUNCHER], Level.OK, "so this is a whole machine"),
    ([process(30, "bash"), LAUNCHER], Level.OK, "beside process 1"),
    ([process(1, "sh -c run", catches=False), LAUNCHER], Level.WARNING, "process 1 (sh) has no handler"),
    ([process(1, "tini -- x"), process(7, "bash run.sh"), LAUNCHER], Level.WARNING, "process 7 (bash) is a shell"),
    (
        [process(1, "/usr/bin/python3 /usr/local/bin/train"), LAUNCHER],
        Level.WARNING,
        "process 1 (train) is the platform's toolkit",
    ),
    ([process(1, "supervise"), LAUNCHER], Level.WARNING, "it is not known whether process 1 (supervise) forwards it"),
    ([process(1, "supervise", ignores=True), LAUNCHER], Level.WARNING, "process 1 (supervise) ignores it"),
    ([process(1, "tini"), process(5, "python x", blocks=True)], Level.ERROR, "SIGTERM is blocked in process 5"),
]


@pytest.mark.parametrize(("chain", "level", "words"), CHAINS, ids=[words for _, _, words in CHAINS])
def test_way_from_process_1_is_judged(chain: list[ProcessFacts], level: Level, words: str) -> None:
    (diagnosis,) = judge(chain, is_launcher=True, is_job=True)
    assert diagnosis.level is level
    assert words in diagnosis.found
    assert bool(diagnosis.to_do) is (level is not Level.OK)


def test_way_does_not_matter_without_a_job() -> None:
    (diagnosis,) = judge([process(1, "sh"), LAUNCHER], is_launcher=False, is_job=False)
    assert diagnosis.level is Level.OK


def test_own_ancestry_ends_with_this_process() -> None:
    chain = ancestry(os.getpid())
    assert chain[-1].pid == os.getpid()
    assert [facts.pid for facts in chain[-2:]] == [os.getppid(), os.getpid()]
    assert chain[-1].blocks is False


def doctor_in_container(folder: Path, *shell: str) -> list[dict[str, Any]]:
    """Run the command in a namespace of processes, as a container has one. Return its findings about signals."""
    if subprocess.run(["unshare", "-pf", "--mount-proc", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make namespaces")
    environment = write_cluster(folder, {"a": "127.0.0.1"})
    flags = ["--cluster-file", str(folder / "cluster.json"), "--host", "a", "--port", "17996"]
    before = ["unshare", "-pf", "--mount-proc", "--kill-child", *shell]
    return run_doctor(*flags, before=before, **environment)[1]["signals"]


@pytest.mark.netns
def test_command_as_process_1_gets_signals_directly(tmp_path: Path) -> None:
    (diagnosis,) = doctor_in_container(tmp_path)
    assert diagnosis["level"] == "ok"
    assert "is process 1 and receives SIGTERM directly" in diagnosis["found"]


@pytest.mark.netns
def test_command_below_a_shell_is_not_told(tmp_path: Path) -> None:
    (diagnosis,) = doctor_in_container(tmp_path, "sh", "-c", '"$@"; exit $?', "-")
    assert diagnosis["level"] == "warning"
    assert "process 1 (sh) has no handler for it, and the kernel drops it" in diagnosis["found"]
    assert "make the launcher process 1" in diagnosis["to_do"]


@pytest.mark.netns
def test_command_that_a_shell_was_replaced_by_is_told(tmp_path: Path) -> None:
    (diagnosis,) = doctor_in_container(tmp_path, "sh", "-c", 'exec "$@"', "-")
    assert diagnosis["level"] == "ok"


@pytest.mark.netns
def test_command_below_the_toolkit_of_the_stock_images_is_not_told(tmp_path: Path) -> None:
    pytest.importorskip("sagemaker_training", reason="needs SageMaker's training toolkit")
    if subprocess.run(["unshare", "-pf", "--mount-proc", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make namespaces")
    code, config = tmp_path / "code", tmp_path / "input" / "config"
    code.mkdir()
    config.mkdir(parents=True)
    (code / "launcher.py").write_text(
        "import os, subprocess, sys\n"
        f"with open({str(tmp_path / 'found.json')!r}, 'w') as file:\n"
        "    subprocess.run([sys.executable, '-m', 'hetero.cli', 'doctor', '--json', '--port=17998'], stdout=file)\n"
    )
    group = {"instance_group_name": "dnn", "instance_type": "ml.p3.2xlarge", "hosts": ["localhost"]}
    resources = {"current_host": "localhost", "hosts": ["localhost"], "instance_groups": [group]}
    parameters = {"sagemaker_program": '"launcher.py"', "sagemaker_submit_directory": json.dumps(str(code))}
    for name, document in (("resource", resources), ("inputdata", {}), ("", {})):
        (config / f"{name}config.json").write_text(json.dumps(document))
    (config / "hyperparameters.json").write_text(json.dumps(parameters))
    environment = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SM_STUDIO_LOCAL_MODE": "true"}
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, "-m", "sagemaker_training.cli.train"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (tmp_path / "found.json").is_file(), done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    (diagnosis,) = [each for each in found if each["subject"] == "signals"]
    assert diagnosis["level"] == "warning"
    assert "is the platform's toolkit, which forwards no signals" in diagnosis["found"]


@pytest.mark.parametrize("has_launcher", [False, True], ids=["alone", "beside a launcher"])
def test_command_with_sigterm_blocked_says_so(has_launcher: bool) -> None:
    with contextlib.ExitStack() as stack:
        if has_launcher:
            words = ["-m", "hetero.cli", "launch"]
            command = [sys.executable, "-c", "print('up', flush=True); input()", *words]
            launcher = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(launcher.kill)
            assert launcher.stdout is not None
            launcher.stdout.readline()
        status, found = run_doctor(before=[sys.executable, "-c", BLOCKED])
    assert status == 1
    assert "SIGTERM is blocked" in found["signals"][-1]["found"]  # after the finding about a launcher that runs here
