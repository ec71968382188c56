"""Run the tests in parts, several at a time, where each part can have a separate network and /dev/shm.

Tests of jobs wait more than they compute, and expect that nothing else listens or shares memory around them. As root,
parts run in namespaces, six on two cores. Other users run them one after the other. Each part is a fork of this
process, which has imported what many of them need. Parts that are started anew take 70 s of CPU more, all together.

    python -m tests.run_parts [options of pytest]
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("ray", "tf", "sagemaker", "examples")
"""Folders whose tests share what takes long to start. The longest first."""
FIRST = ("integration", "reader", "endpoint", "pool", "batch_path", "attacks", "torch")
"""Folders that take minutes. They come before the others. All cores are then busy until the end."""
NETWORKED = "wire"
"""The folder whose long tests install packages: they need the machine's own network."""
FILES_PER_PART = 10
PARTS_PER_CORE = 3
"""With two, cores are idle for an eighth of the time, because jobs wait for each other's processes."""
NUM_SLOWEST = 10


@dataclass(frozen=True, slots=True)
class Part:
    """Files of tests that run in one process."""

    paths: Sequence[Path]
    output: Path
    """What the process prints."""
    report: Path
    """pytest's report. A part that was killed lacks it."""


def main(flags: Sequence[str]) -> int:
    """Run all parts, and print failures and the slowest tests. Return pytest's exit code of a part that failed."""
    is_apart = _can_be_apart()
    if not is_apart:
        print("one part of the tests after the other: no leave for namespaces here (root has it)", flush=True)
    num_places = PARTS_PER_CORE * len(os.sched_getaffinity(0)) if is_apart else 1
    _import_for_all()
    folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed when the first part ends
    parts = [
        Part(paths, folder / f"{number}.txt", folder / f"{number}.xml")
        for number, paths in enumerate(_parts(ROOT / "tests"))
    ]
    waiting, codes, failures = parts[::-1], list[int](), list[str]()
    running = dict[int, Part]()
    try:
        while waiting or running:
            while waiting and len(running) < num_places:
                part = waiting.pop()
                running[_start(part, flags, is_apart=is_apart)] = part
            process, status = os.wait()
            codes.append(os.waitstatus_to_exitcode(status))
            failures += _show(running.pop(process), codes[-1], f"{len(codes)} of {len(parts)}")
        print(*_slowest([part.report for part in parts]), *failures, sep="\n", flush=True)
        return _worst(codes)
    except KeyboardInterrupt:  # has reached the parts too
        return int(pytest.ExitCode.INTERRUPTED)
    finally:
        shutil.rmtree(folder)


def _import_for_all() -> None:
    """Import what many parts need. Nothing here may start a thread, which a fork would not have."""
    # Threads of numeric libraries spin while they wait for each other, on cores that other tests need.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    import hetero.torch  # noqa: F401

    gc.collect()
    gc.freeze()


def _start(part: Part, flags: Sequence[str], *, is_apart: bool) -> int:
    """Start the process of a part. Return its id."""
    if process := os.fork():
        return process
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        with part.output.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if is_apart and not any(path.parent.name == NETWORKED for path in part.paths):
            _enter_namespaces()
        sys.argv = ["pytest", "-q", f"--junitxml={part.report}", *flags, *map(str, part.paths)]
        code = int(pytest.main(sys.argv[1:]))
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - nothing of this process may run in both
        traceback.print_exc()
    finally:
        os._exit(code)


def _parts(tests: Path) -> Iterator[Sequence[Path]]:
    """Yield the paths of each part's tests."""
    yield from (sorted((tests / name).rglob("test_*.py")) for name in WHOLE)
    others = sorted(folder.name for folder in tests.iterdir() if folder.is_dir() and folder.name not in WHOLE + FIRST)
    files = [path for name in (*FIRST, *others) for path in sorted((tests / name).rglob("test_*.py"))]
    files += sorted(tests.glob("test_*.py"))
    yield from (files[first : first + FILES_PER_PART] for first in range(0, len(files), FILES_PER_PART))


def _show(part: Part, code: int, place: str) -> list[str]:
    """Print what a part skipped and how it ended, or all of its output if it failed. Return a line for each failure."""
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return []
    lines = part.output.read_text(errors="replace").splitlines()
    shown = [line for line in lines if line.startswith("SKIPPED ")] + lines[-1:] if code == 0 else lines
    names = [path.relative_to(ROOT) for path in part.paths]
    print(f"part {place}:", *names, *(f"    {line}" for line in shown), sep="\n", flush=True)
    if part.report.exists():
        return [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    # A test that hangs ends its part (`timeout_method`), and so does one that crashes. Both print where it was.
    last = re.findall(r"\bin (test_\w+)", "\n".join(lines))
    return [f"ENDED WITH {code} {' '.join(map(str, names))}: {last[-1] if last else 'no test had begun'}"]


def _slowest(reports: Sequence[Path]) -> list[str]:
    """Return a line for each of the slowest tests of all parts."""
    trees = [ET.parse(report) for report in reports if report.exists()]
    timed = [
        (float(case.attrib["time"]), f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}")
        for tree in trees
        for case in tree.iter("testcase")
    ]
    lines = [f"{time_s:8.1f} s  {test}" for time_s, test in sorted(timed, reverse=True)[:NUM_SLOWEST]]
    return ["slowest tests:", *lines] if lines else []


def _can_be_apart() -> bool:
    """Return whether processes may have namespaces of their own."""
    try:
        return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _enter_namespaces() -> None:
    """Give this process a separate network and /dev/shm."""
    clone_newns, clone_newnet = 0x20000, 0x40000000  # os.unshare came with Python 3.12
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(clone_newns | clone_newnet) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    commands = "mount --make-rprivate /; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up"
    subprocess.run(["sh", "-ec", commands], check=True)


def _worst(codes: Sequence[int]) -> int:
    """Return the code of a part that failed, else 0. A part without a selected test has not failed."""
    ran = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED]
    return next((code for code in ran if code != 0), 0) if ran else int(pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
