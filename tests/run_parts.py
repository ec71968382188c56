"""Run the tests in parts, several at a time, where each part can have a network and a /dev/shm of its own.

Tests of jobs wait more than they compute, and expect that nothing else listens or shares memory around them. As root,
parts run in namespaces, five on two cores; elsewhere they run one after the other.

    python tests/run_parts.py [options of pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("ray", "tf", "examples")
"""Folders whose tests share what takes long to start. The longest first."""
FIRST = ("integration", "sagemaker", "dataplane", "attacks", "torch")
"""Folders that take minutes. They come before the others, so that all cores are busy until the end."""
NETWORKED = "wire"
"""The folder whose long tests install packages: they need the machine's own network."""
FILES_PER_PART = 10
"""Each part takes a second to start."""
PARTS_PER_CORE = 2.5
"""With two, cores are idle for an eighth of the time, because jobs wait for each other's processes."""
NUM_SLOWEST = 10
_APART = (
    *("unshare", "--net", "--mount", "sh", "-ec"),
    'ip link set lo up; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; exec "$@"',
    "sh",
)

Ran = subprocess.CompletedProcess[str]


def main(flags: Sequence[str]) -> int:
    """Run all parts, and print failures and the slowest tests. Return pytest's exit code of a part that failed."""
    apart = _APART if _can_be_apart() else ()
    if not apart:
        print("one part of the tests after the other: no leave for namespaces here (root has it)", flush=True)
    parts = list(_parts(ROOT / "tests"))
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{number}.xml" for number in range(len(parts))]
        with ThreadPoolExecutor(round(PARTS_PER_CORE * len(os.sched_getaffinity(0))) if apart else 1) as pool:
            runs = []
            for report, part in zip(reports, parts, strict=True):
                prefix = () if any(path.parent.name == NETWORKED for path in part) else apart
                command = [*prefix, sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *flags, *part]
                runs.append(pool.submit(_run, command))
            try:
                for run in as_completed(runs):
                    ended.append(run.result())
                    _show(ended[-1], f"{len(ended)} of {len(parts)}")
            except KeyboardInterrupt:  # has reached the parts too
                pool.shutdown(cancel_futures=True)
                return int(pytest.ExitCode.INTERRUPTED)
        lines = [line for ran in ended for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        print(*_slowest(reports), *lines, sep="\n", flush=True)
    return _worst([ran.returncode for ran in ended])


def _parts(tests: Path) -> Iterator[Sequence[Path]]:
    """Yield the paths of each part's tests."""
    yield from (sorted((tests / name).rglob("test_*.py")) for name in WHOLE)
    others = sorted(folder.name for folder in tests.iterdir() if folder.is_dir() and folder.name not in WHOLE + FIRST)
    files = [path for name in (*FIRST, *others) for path in sorted((tests / name).rglob("test_*.py"))]
    files += sorted(tests.glob("test_*.py"))
    yield from (files[first : first + FILES_PER_PART] for first in range(0, len(files), FILES_PER_PART))


def _run(command: Sequence[str | Path]) -> Ran:
    # Threads of numeric libraries spin while they wait for each other, on cores that other tests need.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def _show(ran: Ran, place: str) -> None:
    """Print what a part skipped and how it ended, or all of its output if it failed."""
    if ran.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return
    files = [path.relative_to(ROOT) for path in ran.args if isinstance(path, Path)]
    lines = ran.stdout.splitlines()
    if ran.returncode == pytest.ExitCode.OK:
        lines = [line for line in lines if line.startswith("SKIPPED ")] + lines[-1:]
    print(f"part {place}:", *files, *(f"    {line}" for line in lines), sep="\n", flush=True)


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
    """Return whether commands may run in namespaces of their own."""
    try:
        return subprocess.run([*_APART, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _worst(codes: Sequence[int]) -> int:
    """Return the code of a part that failed, else 0. A part of which no test was selected has not failed."""
    ran = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED]
    return next((code for code in ran if code != 0), 0) if ran else int(pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
