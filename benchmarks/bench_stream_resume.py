"""What do data loaders lose or repeat if a streaming job is resumed?

Question: a job over data that it streams is stopped in the middle of an epoch and resumed. Which samples are lost,
repeated, or come in another order than in a job that was not stopped?

Method: 8 shards with 200 samples each, in the format of each loader. Global batches of 10 samples with one rank and 20
with two, two workers in each rank. hetero has four lanes. The state is taken after the loop has received a batch, and
each resumed job is a new process. Seeds 1 to 5 choose the batch and the order. All samples that the loop received up to
its state, and after it, are compared with an epoch of the same loader that was not stopped.

    a     resumed once
    b     resumed twice in one epoch
    c3,c4 resumed with three or four workers instead of two
    d1,d4 two ranks, resumed with one or four, and the same global batch
    e     a worker is killed with SIGKILL; the state is taken after each batch, and the last one is resumed

A state of each rank goes to the same rank, and ranks without one begin anew (StatefulDataLoader). Energon's states are
redistributed with its tool, which needs the same batch in each rank and the same number of workers over all ranks. The
other states belong to all ranks. A peer that is not installed is skipped by name.

    python benchmarks/bench_stream_resume.py --python mosaic=/environments/mosaic/bin/python --only mosaic
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stream_loaders import PEERS, Peer, Run, write_files

PHASE_S = 45.0
MOST_BATCHES = 400
SCHEDULES = ("a", "b", "c3", "c4", "d1", "d4", "e")
PYTHON_PACKAGES = ("torch", "torchdata", "datasets", "litdata", "webdataset", "mosaicml-streaming", "megatron-energon")


def _work(name: str, run: Run, out: str) -> None:
    """Be one rank: write a line for each batch that the state covers, then how it ended."""
    os.setsid()
    os.environ.update(RANK=str(run.rank), GLOBAL_RANK=str(run.rank), LOCAL_RANK=str(run.rank))
    os.environ.update(WORLD_SIZE=str(run.world), LOCAL_WORLD_SIZE=str(run.world))
    with Path(f"{out}.lines").open("w", encoding="utf-8", buffering=1) as lines:
        try:
            _consume(PEERS[name](run), run, out, lines)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises once more
            lines.write(json.dumps({"end": f"error: {_told(error)}"}) + "\n")
    os._exit(0)


def _told(error: BaseException) -> str:
    """Return an error in one line. If it has no text, the line of code that raised it."""
    line = next(iter(reversed(traceback.extract_tb(error.__traceback__)))).line
    text = str(error).strip() or str(line)
    if "Original Traceback" in text:
        return " ".join(text.splitlines()[-1].split())
    return " ".join(f"{type(error).__name__}: {text}".split())[:600]


def _consume(peer: Peer, run: Run, out: str, lines: io.TextIOWrapper) -> None:
    import torch

    if run.world > 1:
        torch.distributed.init_process_group("gloo", rank=run.rank, world_size=run.world)
    torch.set_num_threads(1)
    place, end = 0, "end"
    for place, batch in enumerate(peer.batches(), 1):
        lines.write(json.dumps(batch) + "\n")
        if run.stop is not None and place >= run.stop:
            if run.world > 1:
                torch.distributed.barrier()
            torch.save(peer.state(), f"{out}.draft")
            Path(f"{out}.draft").replace(f"{out}.{place}.state")
        if place == run.stop and not run.kill:
            break
        if place == run.stop:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        if place == MOST_BATCHES:
            end = "error: the epoch does not end"
            break
    if run.kill and run.stop is not None and place < run.stop:
        end = "error: ended before the kill"
    lines.write(json.dumps({"end": end}) + "\n")


@dataclass(frozen=True)
class Phase:
    """What a job delivered: lists of numbers by step and rank, and how it ended."""

    steps: list[list[int]]
    end: str
    states: tuple[str, ...]


class Jobs:
    """The jobs of one peer and seed."""

    def __init__(self, name: str, folder: str, seed: int) -> None:
        self.name, self.seed, self.folder = name, seed, folder
        self.number = 0
        self._whole: dict[int, Phase] = {}

    def phase(self, world: int, workers: int = 2, **options: Any) -> Phase:
        """Run the ranks of one job, once more if they did not find each other."""
        for _ in range(3):
            found = self._phase(world, workers, **options)
            if "DistNetworkError" not in found.end:
                break
        return found

    def _phase(self, world: int, workers: int, *, batch: int = 10, **options: Any) -> Phase:
        """Run the ranks. Kill what is left of them."""
        self.number += 1
        if self.name == "mosaic":
            from streaming.base.util import clean_stale_shared_memory

            clean_stale_shared_memory()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        outs = [f"{self.folder}/run/{self.seed}-{self.number}-{rank}" for rank in range(world)]
        context = multiprocessing.get_context("fork")
        ranks = []
        for rank, out in enumerate(outs):
            shared = {"folder": self.folder, "seed": self.seed, "world": world, "workers": workers, "batch": batch}
            ranks.append(context.Process(target=_work, args=(self.name, Run(rank=rank, **shared, **options), out)))
            ranks[-1].start()
        until_s = time.monotonic() + PHASE_S
        while time.monotonic() < until_s and any(rank.is_alive() for rank in ranks):
            time.sleep(0.02)
            if any(_read(out)[1].startswith("error") for out in outs if not ranks[outs.index(out)].is_alive()):
                break
        ended = time.monotonic() < until_s
        for rank in ranks:
            rank.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid or 0, signal.SIGKILL)
            rank.join()
        found = [_read(out) for out in outs]
        if ended:
            found = [(batches, "error: the process ended" if end == "hang" else end) for batches, end in found]
        states = [_last_state(out) for out in outs]
        if options.get("kill") and found[0][1] != "end":  # a job goes back to the last state
            found = [(batches[:place], end) for (batches, end), (place, _) in zip(found, states, strict=True)]
        order = ["end", "hang", "error: the process ended"]
        ends = sorted((end for _, end in found), key=lambda end: end in order and len(order) - order.index(end))
        longest = max(len(batches) for batches, _ in found)
        steps = [
            [number for batches, _ in found if step < len(batches) for number in batches[step]]
            for step in range(longest)
        ]
        return Phase(steps, ends[0], tuple(path for _, path in states))

    def whole(self, world: int) -> Phase:
        """Return an epoch that is not stopped."""
        if world not in self._whole:
            self._whole[world] = self.phase(world, batch=10)
        return self._whole[world]

    def outcome(self, world: int, *phases: Phase) -> dict[str, Any]:
        """Compare what the phases delivered together with a whole epoch."""
        whole = self.whole(world)
        bad = next((phase.end for phase in (whole, *phases) if phase.end != "end"), None)
        if bad is not None:
            return {"end": bad}
        steps = [step for phase in phases for step in phase.steps]
        return {"end": "end", **compare(whole.steps, steps, ties=world > 1)}


def _read(out: str) -> tuple[list[list[int]], str]:
    """Return the batches of a rank, and how it ended."""
    path = Path(f"{out}.lines")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    ended = bool(lines) and isinstance(lines[-1], dict)
    return (lines[:-1], lines[-1]["end"]) if ended else (lines, "hang")


def _last_state(out: str) -> tuple[int, str]:
    """Return after how many batches a rank took its last state, and the file."""
    path = Path(out)
    places = [int(found.name.split(".")[1]) for found in path.parent.glob(f"{path.name}.*.state")]
    return (max(places), f"{out}.{max(places)}.state") if places else (0, f"{out}.0.state")


def compare(whole: list[list[int]], steps: list[list[int]], *, ties: bool) -> dict[str, int]:
    """Count samples that were lost and repeated, and those that must be moved to get the order of the whole epoch.

    With ``ties``, the order of the samples of one step does not matter.
    """
    wanted, got = (Counter(number for batch in batches for number in batch) for batches in (whole, steps))
    places: dict[int, int] = {}
    for place, (step, number) in enumerate((step, number) for step, batch in enumerate(whole) for number in batch):
        places.setdefault(number, step if ties else place)
    seen: set[int] = set()
    keys: list[int] = []
    for batch in steps:
        fresh = [number for number in dict.fromkeys(batch) if number in places and number not in seen]
        seen.update(fresh)
        found = [places[number] for number in fresh]
        keys += sorted(found) if ties else found
    tails: list[int] = []  # of the longest subsequence that does not fall
    for key in keys:
        place = bisect.bisect_right(tails, key)
        tails[place : place + 1] = [key]
    lost, repeated = (wanted - got).total(), (got - wanted).total()
    return {"lost": lost, "repeated": repeated, "moved": len(keys) - len(tails)}


def outcomes(jobs: Jobs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the outcome of each schedule."""
    draw = random.Random(jobs.seed)
    length = len(jobs.whole(1).steps)
    first, second = draw.randrange(length // 8, length // 2), draw.randrange(5, length // 3)
    begun = jobs.phase(1, stop=first)
    yield "a", jobs.outcome(1, begun, jobs.phase(1, states=begun.states))
    middle = jobs.phase(1, stop=second, states=begun.states)
    yield "b", jobs.outcome(1, begun, middle, jobs.phase(1, states=middle.states))
    for workers in (3, 4):
        yield f"c{workers}", jobs.outcome(1, begun, jobs.phase(1, workers, states=begun.states))
    killed = jobs.phase(1, stop=first, kill=True)
    told = {"after_kill": killed.end, "batches_after_kill": len(killed.steps) - first}
    rest = [] if killed.end == "end" else [jobs.phase(1, states=killed.states)]
    yield "e", {**jobs.outcome(1, replace(killed, end="end"), *rest), **told}
    begun = jobs.phase(2, stop=max(2, first // 2))
    for world in (1, 4):
        yield f"d{world}", jobs.outcome(2, begun, jobs.phase(world, batch=20 // world, states=begun.states))


def run_peer(name: str, folder: str, seeds: Sequence[int]) -> None:
    """Run all jobs of a peer, in its environment. Write a line for each outcome."""
    import importlib
    import importlib.metadata

    for module in PEERS[name].modules:
        importlib.import_module(module)
    versions = {}
    for package in PYTHON_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    Path(f"{folder}/run").mkdir()
    write_files(folder)
    PEERS[name].prepare(folder)
    with Path(f"{folder}/outcomes").open("w", encoding="utf-8", buffering=1) as lines:
        lines.write(json.dumps(versions) + "\n")
        for seed in seeds:
            for schedule, outcome in outcomes(Jobs(name, folder, seed)):
                lines.write(json.dumps({"peer": name, "schedule": schedule, "seed": seed, **outcome}) + "\n")


def cell(found: Sequence[dict[str, Any]]) -> str:
    """Return lost / repeated / moved as ranges over the seeds, or the errors."""
    ends = Counter(row["end"].partition(". ")[0][:90] for row in found if row["end"] != "end")
    done = [row for row in found if row["end"] == "end"]
    parts = []
    for key in ("lost", "repeated", "moved"):
        numbers = sorted(row[key] for row in done)
        if numbers:
            parts.append(f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}")
    texts = [" / ".join(parts)] if parts else []
    return "; ".join(texts + [f"{end} ({number} of {len(found)})" for end, number in ends.items()]).replace("|", "/")


def report(rows: Sequence[dict[str, Any]], versions: dict[str, dict[str, str]], facts: dict[str, Any]) -> str:
    """Return the tables."""
    lines = ["# Resuming a stream", "", "Samples lost / repeated / out of order, of 1,600 (1,066 with a filter)."]
    lines += ["", "| | " + " | ".join(SCHEDULES) + " |", "|" + "---|" * (len(SCHEDULES) + 1)]
    for name in versions:
        cells = [cell([r for r in rows if (r["peer"], r["schedule"]) == (name, key)]) for key in SCHEDULES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "After a worker was killed (e):", ""]
    for name in versions:
        told = [row["after_kill"] for row in rows if row["peer"] == name and row["schedule"] == "e"]
        ends = Counter(re.sub(r"pid(\(s\))? \d+", "pid N", text)[:150] for text in told)
        lines += [f"- {name}: {end} ({number} times)" for end, number in ends.items()]
    shown = {f"{package} {version}" for found in versions.values() for package, version in found.items()}
    hardware = facts["hardware"]
    about = f"{facts['date']}, commit {facts['commit']}, {hardware['cpus']} CPUs ({hardware['cpu']})"
    lines += ["", f"{about}; {', '.join(sorted(shown))}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run every peer that is installed and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=PATH", help="interpreters of single peers")
    parser.add_argument("--results", type=Path, help="folder of the result")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        run_peer(args.only[0], args.child, args.seeds)
        return 0
    import harness

    facts, rows, versions = harness.environment(), [], {}
    pythons = dict(pair.split("=", 1) for pair in args.python)
    seeds = [str(seed) for seed in args.seeds]
    is_full = args.only == list(PEERS) and len(seeds) >= 5
    folder = args.results or harness.RESULTS / ("" if is_full else "short")
    for name in args.only:
        with tempfile.TemporaryDirectory() as data:
            python = pythons.get(name, sys.executable)
            command = [python, __file__, "--child", data, "--only", name, "--seeds", *seeds]
            with Path(os.environ.get("BENCH_LOG", os.devnull)).open("a", encoding="utf-8") as log:
                begin_s = time.monotonic()
                subprocess.run(command, check=False, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if not Path(f"{data}/outcomes").exists():
                harness.say(f"{name}: skipped, not installed in {python}, or it did not start; see BENCH_LOG")
                continue
            first, *others = Path(f"{data}/outcomes").read_text(encoding="utf-8").splitlines()
            versions[name] = json.loads(first)
            rows += [json.loads(line) for line in others]
            harness.say(f"{name}: {len(others)} outcomes in {time.monotonic() - begin_s:.0f} s")
        content = {"benchmark": "stream_resume", **facts, "peer_versions": versions, "rows": rows}
        harness.save(folder / "stream_resume", content, report(rows, versions, facts))
    print(report(rows, versions, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
