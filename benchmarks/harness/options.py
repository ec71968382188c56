"""The command line that all benchmarks share, and the plan that follows from it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness import comparison, results
from harness.comparison import Protocol
from harness.processes import say
from harness.trials import Row, Trial

_T = TypeVar("_T")

RUNS = 5
SHORT_RUNS = 3
_NOT_NARROWING = frozenset({"short", "results", "estimate", "runs", "seconds"})


def parser(text: str | None, *, seconds: float, short_seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        text: The benchmark's docstring.
        seconds: Of each run in the full form.
        short_seconds: Of each run in the short form.
    """
    made = argparse.ArgumentParser(description=(text or "").split("\n", maxsplit=1)[0], allow_abbrev=False)
    made.add_argument("--short", action="store_true", help="the form that `make bench` runs")
    made.add_argument("--runs", type=int, help=f"rounds, interleaved ({RUNS}; {SHORT_RUNS} with --short)")
    made.add_argument(
        "--seconds", type=float, help=f"of each run after its warm-up ({seconds:g}; {short_seconds:g} with --short)"
    )
    made.add_argument("--only", nargs="+", help="competitors to run")
    made.add_argument("--results", type=Path, help="folder of the result")
    made.add_argument("--estimate", action="store_true", help="say how long it would take, and end")
    made.set_defaults(form_seconds=(seconds, short_seconds))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one call of a benchmark is going to do."""

    name: str
    """Of the result."""
    scope: str
    """``full``, ``short``, or ``partial``: a full result is never written over by anything less."""
    runs: int
    seconds: float
    """Of each run after its warm-up."""
    folder: Path
    options: Mapping[str, Any]
    """The command line as it was understood."""
    estimate_only: bool = False
    _state: dict[str, Any] = field(default_factory=dict)
    """Of `compare`, for `write`."""

    @property
    def path(self) -> Path:
        """Of the result, without an ending."""
        return self.folder / (self.name if self.scope != "partial" else f"{self.name}-partial")

    def choose(self, given: _T | None, *, full: _T, short: _T) -> _T:
        """Return what the command line gave, else what belongs to the form."""
        if given is not None:
            return given
        return short if self.options["short"] else full

    def compare(
        self,
        script: str,
        trials: Sequence[Trial],
        *,
        warmup_batches: int = 8,
        min_batches: int = 4,
        fresh: bool = True,
        seconds: float | None = None,
    ) -> list[Row]:
        """Announce and run the trials. Return a row for each, as `harness.compare` does.

        Args:
            script: The benchmark's file.
            trials: What to run.
            warmup_batches: See `Protocol`.
            min_batches: See `Protocol`.
            fresh: See `Protocol`.
            seconds: Default the plan's.

        Raises:
            SystemExit: Only the estimate was asked for, or there is nothing to run.
        """
        if not trials:
            raise SystemExit(f"{self.name}: nothing to run; see --only and the options that narrow it down")
        protocol = Protocol(
            runs=self.runs,
            seconds=self.seconds if seconds is None else seconds,
            warmup_batches=warmup_batches,
            min_batches=min_batches,
            fresh=fresh,
        )
        estimate_s = comparison.estimate_s(trials, protocol)
        amount = f"{len(trials)} rows x {protocol.runs} runs"
        say(f"{self.name} ({self.scope}): {amount}, about {estimate_s / 60:.1f} minutes")
        if self.estimate_only:
            raise SystemExit(0)
        begin_s = time.monotonic()
        self._state.update(protocol=protocol, facts=results.environment(), estimate_s=estimate_s)
        # An hour's runs should survive what interrupts the last of them.
        unfinished = results.SHORT_RESULTS / f"{self.name}-unfinished"
        rows = comparison.compare(script, trials, protocol, lambda so_far: self._write(unfinished, so_far, "", begin_s))
        for ending in (".json", ".md"):
            unfinished.with_name(unfinished.name + ending).unlink(missing_ok=True)
        self._state["begin_s"] = begin_s
        say(f"{self.name}: took {(time.monotonic() - begin_s) / 60:.1f} minutes")
        return rows

    def write(self, rows: Sequence[Row], text: str) -> None:
        """Print the text, and keep it and the rows of `compare`."""
        print(text, flush=True)
        self._write(self.path, rows, text, self._state["begin_s"])
        say(f"result: {self.path}.json")

    def _write(self, path: Path, rows: Sequence[Row], text: str, begin_s: float) -> None:
        about = {
            "benchmark": self.name,
            "scope": self.scope,
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in self.options.items()},
            "duration_s": round(time.monotonic() - begin_s, 1),
            "estimate_s": round(self._state["estimate_s"], 1),
        }
        results.write(path, rows, text, self._state["protocol"], self._state["facts"], about)


def plan(
    name: str, parser: argparse.ArgumentParser, args: argparse.Namespace, *, neutral: Collection[str] = ()
) -> Plan:
    """Return what the command line asks for.

    A call is *partial* if it has any option of the benchmark itself, or fewer or shorter runs. A partial result gets a
    different name and stays out of the committed folder.

    Args:
        name: Of the result.
        parser: From `parser`.
        args: What it parsed.
        neutral: Options of the benchmark that choose no part of it.
    """
    full_seconds, short_seconds = args.form_seconds
    form_runs, form_seconds = (SHORT_RUNS, short_seconds) if args.short else (RUNS, full_seconds)
    runs = form_runs if args.runs is None else args.runs
    seconds = form_seconds if args.seconds is None else args.seconds
    options = {key: value for key, value in vars(args).items() if key != "form_seconds"}
    changed = {key for key, value in options.items() if value != parser.get_default(key)}
    is_narrowed = bool(changed - _NOT_NARROWING - set(neutral)) or runs < form_runs or seconds < form_seconds
    scope = "partial" if is_narrowed else "short" if args.short else "full"
    folder = args.results or (results.RESULTS if scope == "full" else results.SHORT_RESULTS)
    if scope != "full" and folder.resolve() == results.RESULTS:
        parser.error(f"--results {folder}: a {scope} run does not go there, only full ones do; leave --results out")
    return Plan(
        name=name,
        scope=scope,
        runs=runs,
        seconds=seconds,
        folder=folder,
        options=options,
        estimate_only=args.estimate,
    )
