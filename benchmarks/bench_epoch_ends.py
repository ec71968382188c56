"""How long does a training loop wait at the end of an epoch, with a validation pass between two epochs?

Question: the first batches of an epoch are requested while the epoch before ends. Does the loop still wait for them?

Method: six pipelines (`pipelines/`), two preprocessing processes. Each row trains epochs of 24 batches, and validates
with 8 batches after each. A step waits 1.5 times the processes' time for a batch, so they keep up in the
middle of an epoch. Each step of the validation takes half of that. The figure is the longest wait for the first batch
of an epoch, and of a validation pass, over the step time. The first epoch and the first validation do not count.

    hetero        two endpoints, `hetero.torch.DataLoader`
    hetero-local  the same loader with two of torch's workers
    torch         torch's loader with two workers, as users have it
    persistent    the same with ``persistent_workers=True``

    python benchmarks/bench_epoch_ends.py --pipelines jpeg --only hetero torch
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import bench_pipelines
import harness
from harness import Column, Trial
from peers import endpoint_script, hetero_endpoints, local_torch
from pipelines import NAMES

import hetero.torch

NUM_EPOCHS = 5
EPOCH_BATCHES, VALIDATION_BATCHES = 24, 8
RELATIVE_STEP = 1.5
LEAST_STEP_S = 0.01
IN_SHORT_FORM = ("jpeg", "tabular")

COLUMNS = harness.columns(
    Column(title="step ms", metric="step_s", scale=1e3),
    Column(title="wait within an epoch / step", metric="within_steps", form="{:.2f}"),
    Column(title="longest wait, begin of an epoch / step", metric="epoch_steps", form="{:.2f}"),
    Column(title="longest wait, begin of a validation / step", metric="validation_steps", form="{:.2f}"),
)


class _Epochs:
    """A mix-in for competitors: trains and validates after each run."""

    pauses = True

    def loader(self, num_batches: int) -> Any:
        """Return a loader of so many batches."""
        raise NotImplementedError

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch of a loader that is used for nothing else."""
        yield from self._paced

    def prepare(self) -> None:
        """Make the loaders."""
        self._paced = self.loader(500)
        self._train, self._validation = self.loader(EPOCH_BATCHES), self.loader(VALIDATION_BATCHES)

    def facts(self) -> dict[str, Any]:
        """Train, and return the waits."""
        step_s = max(LEAST_STEP_S, RELATIVE_STEP * self._pace_s())
        within, of_epochs, of_validations = [], [], []
        for _ in range(NUM_EPOCHS):
            first, others = _run_pass(self._train, step_s)
            of_epochs.append(first)
            within += others
            of_validations.append(_run_pass(self._validation, step_s / 2)[0])
        return {
            "step_s": step_s,
            "within_steps": sum(within) / len(within) / step_s,
            "epoch_steps": max(of_epochs[1:]) / step_s,
            "validation_steps": max(of_validations[1:]) / step_s,
        }

    def _pace_s(self) -> float:
        """Return the time per batch of a loop that does nothing else."""
        batches = iter(self._paced)
        for _ in range(8):
            next(batches)
        begin_s = time.perf_counter()
        for _ in range(24):
            next(batches)
        return (time.perf_counter() - begin_s) / 24


def _run_pass(loader: Any, step_s: float) -> tuple[float, list[float]]:
    """Run one pass. Return the wait for its first batch, and those for the others."""
    waits = []
    batches = iter(loader)
    while True:
        begin_s = time.perf_counter()
        try:
            next(batches)
        except StopIteration:
            return waits[0], waits[1:]
        waits.append(time.perf_counter() - begin_s)
        time.sleep(step_s)


class Endpoints(_Epochs, hetero_endpoints.HeteroEndpoints):
    """hetero with endpoints."""

    def start(self) -> None:
        """Start the endpoints and make the loaders."""
        super().start()
        self.prepare()

    def loader(self, num_batches: int) -> Any:
        """Return a loader of so many batches."""
        size = self.pipeline.batch_size
        spec = endpoint_script.register(self.pipeline.name)(length=num_batches * size, root=self.root)
        return hetero.torch.DataLoader(spec, batch_size=size, shuffle=True)


class Workers(_Epochs, local_torch.LocalTorch):
    """torch's workers, with torch's loader or with hetero's."""

    def start(self) -> None:
        """Make the loaders."""
        self.prepare()

    def loader(self, num_batches: int) -> Any:
        """Return a loader of so many batches."""
        size = self.pipeline.batch_size
        shared = {"batch_size": size, "shuffle": True, "num_workers": 2}
        if self.config["kind"] == "hetero-local":
            spec = endpoint_script.register(self.pipeline.name)(length=num_batches * size, root=self.root)
            return hetero.torch.DataLoader(spec, **shared)
        return local_torch.torch.utils.data.DataLoader(
            self.pipeline.build(num_batches * size, self.root),
            collate_fn=self.pipeline.collate,
            worker_init_fn=local_torch.limit_threads,
            persistent_workers=self.config["kind"] == "persistent",
            **shared,
        )


COMPETITORS = {"hetero": Endpoints, "hetero-local": Workers, "torch": Workers, "persistent": Workers}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=0.5, short_seconds=0.5)
    parser.add_argument("--pipelines", nargs="*", choices=NAMES, help="default: all; two with --short")
    args = parser.parse_args(argv)
    plan = harness.plan("epoch_ends", parser, args)
    names = plan.choose(args.pipelines, full=NAMES, short=IN_SHORT_FORM)
    only = plan.choose(args.only, full=list(COMPETITORS), short=list(COMPETITORS))
    if not args.estimate:
        bench_pipelines.make_photos()
    trials = [
        Trial(
            competitor=kind,
            group=name,
            config={"pipeline": name, "root": str(bench_pipelines.PHOTOS), "kind": kind},
            environment=bench_pipelines.ENVIRONMENT,
            start_s=6.0,
            warmup_s=12.0,
        )
        for name in names
        for kind in only
    ]
    rows = plan.compare(__file__, trials, warmup_batches=4, min_batches=4)
    title = "The wait at the end of an epoch"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="epoch_steps"))
    return 0


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether hetero's loaders wait at most one step, in each run."""
    lines = []
    for row in rows:
        if row.trial.competitor.startswith("hetero"):
            for what, metric in (("an epoch", "epoch_steps"), ("a validation", "validation_steps")):
                longest = max(row.values(metric), default=float("nan"))
                lines.append(harness.target(f"{row.trial.name}: begin of {what} / step", longest, 1, at_most=True))
    return lines


if __name__ == "__main__":
    harness.dispatch(COMPETITORS)
    sys.exit(main())
