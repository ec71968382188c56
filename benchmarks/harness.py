"""What every benchmark shares: fresh trainer processes, interleaved rounds, CPU and memory of both sides, result files.

A `Competitor` is one way to feed a trainer. It runs in a *trainer process* of its own, started by `Trial`; whatever
it starts to compute batches (workers, servers) is a descendant of that process and counts as *supply*. `compare` runs
the trials of one table round by round, in an order that rotates, so that a noisy minute hits all of them alike. Each
run is: warm-up batches, which are not counted, then at least ``seconds`` and ``min_batches`` of measuring.

    class MyLoader(Competitor):
        def start(self): ...             # connect, start workers; timed together with the first batch
        def batches(self): yield ...     # endless
        def stop(self): ...

    if __name__ == "__main__":
        harness.dispatch({"my-loader": MyLoader}, servers={"my-server": serve})   # returns in the parent only
        rows = harness.compare(__file__, trials, runs=5, seconds=3.0, warmup_batches=8)
        harness.write("pipelines", rows, text, folder)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

HERE = Path(__file__).parent
RESULTS = HERE / "results"
_REPLY_TIMEOUT_S = 300.0
_PACKAGES = (
    *("hetero", "grpcio", "numpy", "protobuf", "torch", "tensorflow", "ray", "rpcdataloader"),
    *("opencv-python-headless", "lz4", "zstandard"),
)


class Competitor:
    """One way to feed a trainer; made in the trainer process. Subclasses override the methods.

    Args:
        config: What the trial says, JSON values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def start(self) -> None:
        """Start what computes batches, and connect to it."""

    def batches(self) -> Iterator[Any]:
        """Yield batches without end, for one consumer."""
        raise NotImplementedError

    def consume(self, batch: Any) -> tuple[int, int]:
        """Use one batch as a trainer would; return its samples and bytes."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """Take note that the warm-up is over."""

    def facts(self) -> dict[str, Any]:
        """Return what else the row should say after a run."""
        return {}

    def stop(self) -> None:
        """End what `start` started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one trial, as its trainer process measured it."""

    seconds: float
    num_batches: int
    num_samples: int
    num_bytes: int
    trainer_cpu_s: float
    """All threads of the trainer process."""
    supply_cpu_s: float
    """All its descendants."""
    trainer_peak_bytes: int
    """Resident, at its highest while measuring."""
    trainer_growth_bytes: int
    """That, less what was resident before the competitor started."""
    supply_bytes: int
    """Resident memory of the descendants at the end, shared pages counted once per process."""
    first_batch_s: float
    """From the beginning of `Competitor.start` to the first batch."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def batches_per_s(self) -> float:
        """Batches per second of wall time."""
        return self.num_batches / self.seconds

    @property
    def samples_per_s(self) -> float:
        """Samples per second of wall time."""
        return self.num_samples / self.seconds

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of payload per second of wall time."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def trainer_cpu_s_per_gb(self) -> float:
        """CPU-seconds of the trainer process per 10^9 bytes."""
        return self.trainer_cpu_s / (self.num_bytes / 1e9) if self.num_bytes else 0.0

    @property
    def supply_cpu_s_per_gb(self) -> float:
        """CPU-seconds of the supply per 10^9 bytes."""
        return self.supply_cpu_s / (self.num_bytes / 1e9) if self.num_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row to be: a competitor and its configuration."""

    competitor: str
    """Key of `dispatch`'s competitors."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Given to it; JSON values. Trials of equal ``group`` are compared with each other."""
    group: str = ""
    title: str = ""
    """In the table; default the competitor."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the trainer process's."""
    basis: str = "measured"
    """Or ``simulated``."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.title or self.competitor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trial and its runs."""

    trial: Trial
    runs: tuple[Run, ...]
    error: str = ""
    """Why there are none."""

    def median(self, metric: str) -> float:
        """Return the median of an attribute or fact of the runs; NaN without runs."""
        values = self.values(metric)
        return statistics.median(values) if values else float("nan")

    def values(self, metric: str) -> list[float]:
        """Return an attribute or fact of each run."""
        return [run.facts[metric] if metric in run.facts else getattr(run, metric) for run in self.runs]

    def spread(self, metric: str) -> float:
        """Return (highest - lowest) / median."""
        values = self.values(metric)
        middle = self.median(metric)
        return (max(values) - min(values)) / middle if values and middle else float("nan")


class ProcessFailedError(Exception):
    """A trainer or server process ended or did not answer."""


class Child:
    """A process of this benchmark that takes commands on stdin and answers in JSON lines on a descriptor of its own.

    Args:
        script: The benchmark's file, which calls `dispatch` first thing.
        role: ``trainer`` or ``server``.
        name: Of the competitor or server.
        config: Given to it.
        environment: Added to this process's.
    """

    def __init__(
        self, script: str, role: str, name: str, config: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        read_end, write_end = os.pipe()
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        self._name = name
        self._errors = Path(os.environ.get("BENCH_LOG", os.devnull)).open("ab")  # noqa: SIM115 - closed in stop
        self._process = subprocess.Popen(
            [sys.executable, script, f"--child-{role}", name, str(write_end), json.dumps(dict(config))],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(write_end,),
            env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
            start_new_session=True,
        )
        os.close(write_end)
        self._replies: IO[str] = os.fdopen(read_end, encoding="utf-8")

    def ask(self, command: str = "", timeout_s: float = _REPLY_TIMEOUT_S) -> Any:
        """Send a command, unless it is empty, and return the answer.

        Raises:
            ProcessFailedError: The process failed, ended, or did not answer in time.
        """
        import select

        try:
            if command:
                self._send(command)
            ready, _, _ = select.select([self._replies], [], [], timeout_s)
            line = self._replies.readline() if ready else ""
        except OSError as error:
            raise ProcessFailedError(f"{self._name}: {error}") from error
        if not line:
            state = "ended" if ready else f"did not answer within {timeout_s:g} s"
            raise ProcessFailedError(f"{self._name} {state}; set BENCH_LOG to a file to see its output")
        reply = json.loads(line)
        if isinstance(reply, dict) and "error" in reply:
            raise ProcessFailedError(f"{self._name}: {reply['error']}")
        return reply

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its descendants."""
        return _cpu_s([psutil.Process(self._process.pid), *descendants(self._process.pid)])

    def stop(self, grace_s: float = 15.0) -> None:
        """Have it end; kill it and what it started if it does not."""
        family = descendants(self._process.pid)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.wait(2.0)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._replies.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()


def dispatch(
    competitors: Mapping[str, Callable[[Mapping[str, Any]], Competitor]],
    servers: Mapping[str, Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]] | None = None,
) -> None:
    """Become a trainer or server process if the command line says so, and then do not return.

    Args:
        competitors: Made in trainer processes.
        servers: Context managers in server processes; what they enter with is the reply, or a function that makes one
            for every later question.
    """
    if len(sys.argv) != 5 or not sys.argv[1].startswith("--child-"):
        return
    role, name, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[3]), "w", encoding="utf-8") as replies:
        try:
            if role == "--child-trainer":
                _be_trainer(competitors[name](config), replies)
            else:
                with (servers or {})[name](config) as facts:
                    _reply(replies, {} if callable(facts) else facts)
                    for _ in sys.stdin:  # until the parent is gone or has had enough
                        _reply(replies, facts() if callable(facts) else facts)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            import traceback

            traceback.print_exc()
            with contextlib.suppress(OSError):
                _reply(replies, {"error": f"{type(error).__name__}: {error}"[:2000]})
            status = 1
        else:
            status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # frameworks' exit handlers are no part of any question


def _reply(replies: IO[str], content: Any) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


def _be_trainer(competitor: Competitor, replies: IO[str]) -> None:
    before_bytes = _resident_bytes()
    begin_s = time.perf_counter()
    competitor.start()
    try:
        batches = iter(competitor.batches())
        competitor.consume(next(batches))
        first_batch_s = time.perf_counter() - begin_s
        _reply(replies, {"first_batch_s": first_batch_s})
        for line in sys.stdin:
            command = json.loads(line)
            for _ in range(command["warmup_batches"]):
                competitor.consume(next(batches))
            competitor.begin_run()
            run = _measure(competitor, batches, before_bytes, first_batch_s, command)
            _reply(replies, dataclasses.asdict(run))
    finally:
        competitor.stop()


def _measure(
    competitor: Competitor,
    batches: Iterator[Any],
    before_bytes: int,
    first_batch_s: float,
    command: Mapping[str, Any],
) -> Run:
    _reset_peak()
    num_batches = num_samples = num_bytes = 0
    supply_before_s, _ = supply_usage()
    cpu_before_s = _own_cpu_s()
    begin_s = now_s = time.perf_counter()
    end_s = begin_s + command["seconds"]
    while now_s < end_s or num_batches < command["min_batches"]:
        samples, nbytes = competitor.consume(next(batches))
        num_batches += 1
        num_samples += samples
        num_bytes += nbytes
        now_s = time.perf_counter()
    cpu_s = _own_cpu_s() - cpu_before_s
    supply_s, supply_bytes = supply_usage()
    peak_bytes = _peak_bytes()
    return Run(
        seconds=now_s - begin_s,
        num_batches=num_batches,
        num_samples=num_samples,
        num_bytes=num_bytes,
        trainer_cpu_s=cpu_s,
        supply_cpu_s=supply_s - supply_before_s,
        trainer_peak_bytes=peak_bytes,
        trainer_growth_bytes=peak_bytes - before_bytes,
        supply_bytes=supply_bytes,
        first_batch_s=first_batch_s,
        facts=competitor.facts(),
    )


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes below one; empty if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def supply_usage() -> tuple[float, int]:
    """Return CPU seconds and resident bytes of this process's descendants."""
    family = descendants(os.getpid())
    nbytes = 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            nbytes += process.memory_info().rss
    return _cpu_s(family), nbytes


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            # Ended grandchildren count through their parents.
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _reset_peak() -> None:
    with contextlib.suppress(OSError):  # without it the peak is that since the process began
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def compare(
    script: str,
    trials: Sequence[Trial],
    *,
    runs: int = 5,
    seconds: float = 3.0,
    warmup_batches: int = 8,
    min_batches: int = 4,
    fresh: bool = True,
    on_round: Callable[[int], None] | None = None,
) -> list[Row]:
    """Run all trials of each group, interleaved, and return a row for each.

    Args:
        script: The benchmark's file.
        trials: In the order of the table; run group by group.
        runs: Rounds, >= 1; five or more for a result.
        seconds: Of each run, after its warm-up.
        warmup_batches: Before each run; must exceed what buffers between supply and trainer hold.
        min_batches: Of each run, however long they take.
        fresh: New processes in every round; else one per trial, kept through the rounds of its group.
        on_round: Told the number of each round that begins.
    """
    command = json.dumps({"seconds": seconds, "warmup_batches": warmup_batches, "min_batches": min_batches})
    rows: list[Row] = []
    for group in dict.fromkeys(trial.group for trial in trials):
        members = [trial for trial in trials if trial.group == group]
        found: list[list[Run]] = [[] for _ in members]
        errors = ["" for _ in members]
        kept: dict[int, Child] = {}
        try:
            for round_index in range(runs):
                if on_round is not None:
                    on_round(round_index)
                for offset in range(len(members)):
                    index = (offset + round_index) % len(members)
                    if not errors[index]:
                        errors[index] = _run_once(script, members[index], command, found[index], kept, index, fresh)
                        _say_run(members[index], round_index, runs, found[index], errors[index])
        finally:
            for child in kept.values():
                child.stop()
        rows += [
            Row(trial=trial, runs=tuple(found_runs), error=error)
            for trial, found_runs, error in zip(members, found, errors, strict=True)
        ]
    return rows


def _run_once(
    script: str, trial: Trial, command: str, found: list[Run], kept: dict[int, Child], index: int, fresh: bool
) -> str:
    """Run a trial once; return what went wrong."""
    child = kept.get(index)
    try:
        if child is None:
            child = kept[index] = Child(script, "trainer", trial.competitor, trial.config, trial.environment)
            child.ask()
        found.append(Run(**child.ask(command)))
    except ProcessFailedError as error:
        kept.pop(index).stop(1.0)
        return str(error)
    if fresh:
        kept.pop(index).stop()
    return ""


def _say_run(trial: Trial, round_index: int, runs: int, found: Sequence[Run], error: str) -> None:
    name = " ".join(filter(None, [trial.group, trial.name]))
    if error:
        say(f"{round_index + 1}/{runs} {name}: FAILED {error}")
    else:
        run = found[-1]
        say(
            f"{round_index + 1}/{runs} {name}: {run.batches_per_s:.1f} batches/s, {run.gb_per_s:.2f} GB/s, CPU-s/GB "
            f"trainer {run.trainer_cpu_s_per_gb:.2f}, supply {run.supply_cpu_s_per_gb:.2f}"
        )


# Tables and files


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    metric: str
    """Attribute or fact of `Run`."""
    form: str = "{:.2f}"
    scale: float = 1.0


def table(rows: Sequence[Row], columns: Sequence[Column], *, ratio_metric: str, reference: str | None = None) -> str:
    """Return rows of one group as Markdown: medians, spread, and ratios of one metric to each other row.

    Args:
        rows: Of one group.
        columns: What to show.
        ratio_metric: Higher is better; its spread is shown.
        reference: Name in the numerator of the ratios, ``x reference / row``; None for no ratio column.
    """
    base = next((row for row in rows if row.trial.name == reference), None)
    titles = ["", *(column.title for column in columns), "spread", *([f"{reference} / this"] if base else []), "basis"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        if not row.runs:
            lines.append(f"| {row.trial.name} | failed: {row.error.splitlines()[0][:200] if row.error else ''} |")
            continue
        cells = [row.trial.name]
        cells += [column.form.format(row.median(column.metric) * column.scale) for column in columns]
        cells.append(f"{100 * row.spread(ratio_metric):.0f} %")
        if base is not None:
            own = row.median(ratio_metric)
            cells.append(f"{base.median(ratio_metric) / own:.2f}" if own and base.runs else "")
        cells.append(row.trial.basis)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio(rows: Sequence[Row], name: str, other: str, metric: str) -> float:
    """Return the median of one name over that of another; NaN if either has none."""
    found = {row.trial.name: row.median(metric) for row in rows if row.runs}
    return found[name] / found[other] if name in found and found.get(other) else float("nan")


def target(what: str, found: float, bound: float, *, at_most: bool = False) -> str:
    """Return one line that says whether a figure is met."""
    if found != found:  # NaN
        return f"- {what}: not measured"
    met = found <= bound if at_most else found >= bound
    return (
        f"- {what}: {found:.2f}, {'at most' if at_most else 'at least'} {bound:g} wanted: {'met' if met else 'MISSED'}"
    )


def environment() -> dict[str, Any]:
    """Return what every result depends on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"], check=False, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "commit": commit,
        "hardware": {
            "cpu": _cpu_model(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "machine": platform.machine(),
            "kernel": platform.release().split("-")[0],
        },
        "load_average": os.getloadavg()[0],
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def write(name: str, rows: Sequence[Row], text: str, folder: Path, **settings: Any) -> None:
    """Keep a result: ``NAME.json`` with a row per trial, ``NAME.md`` for readers."""
    facts = environment()
    content = {
        **facts,
        "settings": settings,
        "rows": [
            {
                "competitor": row.trial.competitor,
                "name": row.trial.name,
                "group": row.trial.group,
                "config": dict(row.trial.config),
                "environment": dict(row.trial.environment),
                "basis": row.trial.basis,
                "error": row.error,
                "medians": {key: row.median(key) for key in _metrics(row)},
                "runs": [dataclasses.asdict(run) for run in row.runs],
            }
            for row in rows
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    hardware = facts["hardware"]
    footer = (
        f"{facts['date']}, commit {facts['commit']}, {hardware['cpus']} CPUs ({hardware['cpu']}); {versions}. "
        f"Settings: {json.dumps(settings)}. Spread is (highest - lowest) / median over the runs."
    )
    (folder / f"{name}.md").write_text(f"{text.rstrip()}\n\n{footer}\n", encoding="utf-8")
    say(f"result: {folder / name}.json")


def _metrics(row: Row) -> list[str]:
    if not row.runs:
        return []
    names = [
        *("batches_per_s", "samples_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
        *("first_batch_s", "trainer_peak_bytes", "trainer_growth_bytes", "supply_bytes"),
    ]
    return names + [key for key, value in row.runs[0].facts.items() if isinstance(value, int | float)]


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=text.splitlines()[0], allow_abbrev=False)
    made.add_argument("--runs", type=int, default=5, help="rounds, interleaved (%(default)s)")
    made.add_argument("--seconds", type=float, help="of each run after its warm-up")
    made.add_argument("--short", action="store_true", help="the form that `make bench` runs")
    made.add_argument("--results", type=Path, help="folder of the result (results/, or results/short/ with --short)")
    made.add_argument("--only", nargs="+", help="competitors to run")
    return made


def results_folder(args: argparse.Namespace) -> Path:
    """Return where the result goes."""
    return args.results or (RESULTS / "short" if args.short else RESULTS)
