"""Data hosts that join one job and leave it again, in real processes: is any batch lost, repeated or out of order?

    python -m tests.chaos.joins --events 500 --seed 1

An event is a join or a leave. A host leaves by a notice (SIGTERM) or, unless ``--no-kills``, by SIGKILL. The chain over
all batches must be that of one host alone. Without kills, hosts must have computed each batch exactly once. A host that
got a notice must end with 143. The time from the start of a host's process to its first endpoint, without the import of
the script, is measured. Prints a summary in JSON, and exits with 1 if anything was violated.

Result: 500 events in two jobs. In one, hosts left by 125 notices. In the other, they left by 60 notices and 63 kills.
No batch was lost, repeated or out of order. In the job without kills one batch was computed twice. That job had sent 18
hedges. A host served at most 2.0 s after its process had started, half of them within 0.9 s.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("join_script.py")
PORT = 17811
BATCH_SIZE = 8
"""Of the script."""
_MAX_PRESENT = 4
_READY = "serving with "
_WAIT_S = 120.0
_LOST = re.compile(r"data host (\S+) has left the job")


class Launcher:
    """One `hetero launch`."""

    def __init__(
        self, name: str, folder: Path, words: Sequence[str], args: Sequence[str], *, is_logged: bool = False
    ) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        self.began_s = time.monotonic()
        self.ready_s: float | None = None
        self.lines: list[str] = []
        self.ended_by = 0
        environ = {
            **os.environ,
            "HETERO_HOSTS_FILE": str(folder / "hosts"),
            "HETERO_TOKEN_FILE": str(folder / "token"),
            "HETERO_JOB_ID": "joins",
            "HETERO_TIME_SCALE": "0.2",
            "HETERO_JOINS_LOG": str(folder / f"computed-{name}") if is_logged else "",
            "SAGEMAKER_BASE_DIR": str(self.folder / "ml"),
        }
        command = [sys.executable, "-m", "hetero.cli", "launch", "--host", name, "--port", str(PORT)]
        command += ["--endpoints-per-host", "1", "--trainer-endpoints", "0", "--purity-checks", "0"]
        command += ["--output-dir", str(self.folder / "out"), *words, str(SCRIPT), "--", *args]
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if _READY in line and self.ready_s is None:
                self.ready_s = time.monotonic() - self.began_s

    def wait_ready(self) -> bool:
        """Wait until its endpoints serve. Return False if it ends before."""
        deadline_s = time.monotonic() + _WAIT_S
        while self.ready_s is None and time.monotonic() < deadline_s and self.process.poll() is None:
            time.sleep(0.02)
        return self.ready_s is not None

    def end(self, number: int) -> None:
        """Send a signal that ends it."""
        self.ended_by = number
        self.process.send_signal(number)

    def events(self) -> dict[str, int]:
        """Return its counters, empty if it has written none."""
        path = self.folder / "out" / "metrics.json"
        found: dict[str, int] = json.loads(path.read_text())["events"] if path.is_file() else {}
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-kills", action="store_true")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="hetero-joins-"))
    try:
        summary = soak(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(summary, indent=2))
    return 1 if summary["violations"] else 0


def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job and its guests, then the reference. Return what was found."""
    rng = random.Random(args.seed)
    network = f"127.{120 + os.getpid() % 100}"
    names = ["trainer", "first", *(f"guest-{number}" for number in range(args.events))]
    hosts = (f"{network}.{number // 200 + 1}.{number % 200 + 1} {name}\n" for number, name in enumerate(names))
    (folder / "hosts").write_text("".join(hosts))
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text("the-token-of-this-job-0123456789")
    groups = [
        {"instance_group_name": "data", "instance_type": "ml.c5.xlarge", "hosts": ["first"]},
        {"instance_group_name": "trainer", "instance_type": "ml.p3.2xlarge", "hosts": ["trainer"]},
    ]
    (folder / "cluster.json").write_text(json.dumps({"instance_groups": groups}))
    enough, result = folder / "enough", folder / "result.json"
    script_args = ["--output", str(result), "--enough", str(enough)]
    where = ["--cluster-file", str(folder / "cluster.json")]
    trainer = Launcher("trainer", folder, where, script_args)
    first = Launcher("first", folder, where, script_args, is_logged=args.no_kills)
    violations: list[str] = []
    present: list[Launcher] = []
    gone: list[Launcher] = []
    num_events = 0
    try:
        if not first.wait_ready():
            return {"violations": ["the job did not begin", *trainer.lines[-20:], *first.lines[-20:]]}
        num_events = visits(args, rng, trainer, names[2:], folder, script_args, present, gone, violations)
        enough.touch()
        violations += wrong_ends((trainer, first, *present), gone)
    finally:
        for launcher in (trainer, first, *present, *gone):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.process.pid, signal.SIGKILL)
    found = json.loads(result.read_text())
    reference = reference_chain(folder, found["steps"])
    if found["chain"] != reference:
        violations.append("the batches are not those of one host alone")
    report = json.loads((folder / "trainer" / "out" / "report.json").read_text())["run"]
    twice, hedges = computed_twice(folder), report["events"].get("hedges", 0)
    if twice > hedges:  # a hedge asks a second host on purpose
        violations.append(f"{twice} batches were computed twice, with {hedges} hedges")
    ready_s = [guest.ready_s for guest in (*present, *gone) if guest.ready_s is not None]
    return {
        "events": num_events,
        "joins": len(present) + len(gone),
        "notices": sum(guest.ended_by == signal.SIGTERM for guest in gone),
        "kills": sum(guest.ended_by == signal.SIGKILL for guest in gone),
        "steps": found["steps"],
        "batches": report["events"]["batches"],
        "batches_computed_twice": twice if args.no_kills else None,
        "hedges": hedges,
        "failovers": report["events"].get("failovers", 0),
        "joined_hosts_in_report": len(report["joined_hosts"]),
        "seconds_to_serve_median": round(statistics.median(ready_s), 2),
        "seconds_to_serve_largest": round(max(ready_s), 2),
        "import_seconds": round(import_s(), 2),
        "violations": violations,
    }


def visits(
    args: argparse.Namespace,
    rng: random.Random,
    trainer: Launcher,
    names: Sequence[str],
    folder: Path,
    script_args: Sequence[str],
    present: list[Launcher],
    gone: list[Launcher],
    violations: list[str],
) -> int:
    """Let hosts join and leave. Return the number of events."""
    num_events = 0
    while num_events < args.events and trainer.process.poll() is None:
        if len(present) < rng.randint(1, _MAX_PRESENT):
            guest = Launcher(
                names[len(present) + len(gone)],
                folder,
                ["--join", f"trainer:{PORT}"],
                script_args,
                is_logged=args.no_kills,
            )
            if not guest.wait_ready():
                violations.append(f"{guest.name} did not get in: {guest.lines[-3:]}")
            (present if guest.ready_s is not None else gone).append(guest)
        else:
            guest = present.pop(rng.randrange(len(present)))
            guest.end(signal.SIGTERM if args.no_kills or rng.random() < 0.5 else signal.SIGKILL)
            gone.append(guest)
        num_events += 1
        if num_events % 50 == 0:
            print(f"{num_events} events, {len(present)} guests", file=sys.stderr, flush=True)
    return num_events


def wrong_ends(stayed: Sequence[Launcher], gone: Sequence[Launcher]) -> list[str]:
    """Return how launchers ended that should have ended otherwise."""
    found = []
    for launcher in stayed:
        code = launcher.process.wait(_WAIT_S)
        if code != 0:
            found.append(f"{launcher.name} ended with {code}: {launcher.lines[-5:]}")
    for guest in gone:
        code = guest.process.wait(_WAIT_S)
        expected = -signal.SIGKILL if guest.ended_by == signal.SIGKILL else 128 + signal.SIGTERM
        if guest.ended_by and code != expected:
            found.append(f"{guest.name} ended with {code}, expected {expected}: {guest.lines[-5:]}")
    return found


def computed_twice(folder: Path) -> int:
    """Return the number of batches that two processes have computed. No sample occurs twice in the job.

    Samples that each process computes twice at its start, to check itself, do not count.
    """
    lists = [[line.split()[0] for line in path.read_text().splitlines()] for path in folder.glob("computed-*")]
    checks = {index for listed in lists for index, number in collections.Counter(listed).items() if number > 1}
    counts = collections.Counter(index for listed in lists for index in listed if index not in checks)
    return math.ceil(sum(number - 1 for number in counts.values()) / BATCH_SIZE)


def reference_chain(folder: Path, steps: int) -> str:
    """Return the chain of so many steps in one process without a launcher."""
    path = folder / "reference.json"
    command = [sys.executable, str(SCRIPT), "--output", str(path), "--enough", str(folder / "never")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HETERO_")}
    subprocess.run([*command, "--limit", str(steps), "--step-s", "0"], check=True, env=environ, capture_output=True)
    found: str = json.loads(path.read_text())["chain"]
    return found


def import_s() -> float:
    """Return the seconds that importing the script takes."""
    begin_s = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import runpy; runpy.run_path({str(SCRIPT)!r})"], check=True)
    return time.monotonic() - begin_s


if __name__ == "__main__":
    sys.exit(main())
