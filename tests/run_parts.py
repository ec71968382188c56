"""Run the tests: those of whole jobs beside all the others, where they can have a network and a /dev/shm of their own.

Tests of jobs wait more than they compute, and expect that nothing else listens or shares memory around them. As root,
in namespaces, two parts of them run at the same time as the rest; elsewhere all run one after the other.

    python tests/run_parts.py [options of pytest]
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

JOBS = ("tests/integration", "tests/chaos")
JOBS_ELSEWHERE = ("tests/examples", "tests/ray", "tests/sagemaker/rehearsal", "tests/sagemaker/test_notebooks.py")
"""Tests of jobs in other folders. They run with the second part, so that all parts end at about the same time."""
SECOND_PART = (
    "tests/chaos",
    *(f"tests/integration/test_{name}.py" for name in ("entry_points", "mpirun", "rehearsals", "slurm", "tf_service")),
    *(f"tests/integration/test_{name}.py" for name in ("auto_endpoints", "planning_example", "tf_profile")),
)
"""Of the jobs: about half of their time."""
NUM_SLOWEST = 10
_APART = (
    *("unshare", "--net", "--mount", "sh", "-ec"),
    'ip link set lo up; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; exec "$@"',
    "sh",
)


def main(flags: Sequence[str]) -> int:
    """Run all parts, then print the slowest tests. Return pytest's exit code of what failed."""
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{part}.xml" for part in ("rest", "first", "second")]
        code = _run([[sys.executable, "-m", "pytest", f"--junitxml={report}", *flags] for report in reports])
        print(*_slowest(reports), sep="\n", flush=True)
    return code


def _run(pytests: Sequence[Sequence[str]]) -> int:
    """Run all parts; what the tests of jobs printed follows the rest. Return pytest's exit code of what failed.

    Args:
        pytests: The beginnings of the commands of the three parts.
    """
    of_rest, of_first, of_second = pytests
    rest_command = [*of_rest, *(f"--ignore={path}" for path in (*JOBS, *JOBS_ELSEWHERE))]
    if not _can_be_apart():
        print("the tests of jobs run after the others: no leave for namespaces here (root has it)", flush=True)
        return _worst(subprocess.call(rest_command), subprocess.call([*of_first, *JOBS, *JOBS_ELSEWHERE]))
    first_part = [folder for folder in JOBS if folder not in SECOND_PART]
    commands = [
        [*_APART, *of_first, *(f"--ignore={path}" for path in SECOND_PART), *first_part],
        [*_APART, *of_second, *SECOND_PART, *JOBS_ELSEWHERE],
    ]
    codes = []
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        started = [
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            for command, output in zip(commands, outputs, strict=True)
        ]
        try:
            codes.append(subprocess.call(rest_command))
            print("waiting for the tests of jobs, which have run since the beginning", flush=True)
        finally:  # Ctrl-C reaches all of them
            for jobs, output in zip(started, outputs, strict=True):
                codes.append(jobs.wait())
                output.seek(0)
                sys.stdout.write(output.read().decode(errors="replace"))
                sys.stdout.flush()
    return _worst(*codes)


def _slowest(reports: Sequence[Path]) -> list[str]:
    """Return a line for each of the slowest tests of all parts. A part that was killed has no report."""
    trees = [ET.parse(report) for report in reports if report.exists()]
    timed = [
        (float(case.attrib["time"]), f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}")
        for tree in trees
        for case in tree.iter("testcase")
    ]
    lines = [f"{time_s:8.1f} s  {test}" for time_s, test in sorted(timed, reverse=True)[:NUM_SLOWEST]]
    return ["slowest tests:", *lines] if lines else []


def _can_be_apart() -> bool:
    """Tell whether commands may run in namespaces of their own."""
    try:
        return subprocess.run([*_APART, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _worst(*codes: int) -> int:
    """Return the code of the part that failed; that a selection left no test in a part is no failure."""
    ran = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED]
    return next((code for code in ran if code != 0), 0) if ran else int(pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
