"""What is compared, `Competitor` and `Trial`, and what was found, `Run` and `Row`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Competitor:
    """One way to feed a trainer; made in the trainer process. Subclasses override the methods.

    Args:
        config: What the trial says, JSON values.
    """

    min_warmup_s = 0.2
    """Of each run, whatever the number of warm-up batches: sockets hold hundreds of small ones, and some supplies need
    seconds until they are at full speed."""
    pauses = False
    """Its supply would go on computing after a run: where processes are kept, its iterator is closed and made anew."""

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
        """Return what else the row should say; called after a run, outside of what is measured."""
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

    def value(self, metric: str) -> float:
        """Return an attribute, property or fact; every metric that a table or a plot names."""
        return float(self.facts[metric] if metric in self.facts else getattr(self, metric))


METRICS = (
    *("batches_per_s", "samples_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
    *("first_batch_s", "trainer_peak_bytes", "trainer_growth_bytes", "supply_bytes"),
)
"""Of every run; facts come on top."""


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
    fresh: bool | None = None
    """New processes in every round; None: as the protocol says."""
    start_s: float = 3.0
    """Estimate of start, first batch and stop together; for the announcement only."""
    warmup_s: float = 0.5
    """Estimate of the warm-up and of what else a run takes beside its measuring; for the announcement only."""

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
    """Why there are none, or fewer than asked for."""

    def median(self, metric: str) -> float:
        """Return the median of an attribute or fact of the runs; NaN without runs."""
        values = self.values(metric)
        return statistics.median(values) if values else float("nan")

    def values(self, metric: str) -> list[float]:
        """Return an attribute or fact of each run."""
        return [run.value(metric) for run in self.runs]

    def ratios(self, other: Row, metric: str) -> list[float]:
        """Return this row's value over the other's in the same round, for every round.

        Where the machine becomes slower and faster from one minute to the next, that is what stays. Rows without the
        same rounds are compared by their medians.
        """
        if not self.runs or not other.runs:
            return []
        if len(self.runs) != len(other.runs):
            pairs = [(self.median(metric), other.median(metric))]
        else:
            pairs = list(zip(self.values(metric), other.values(metric), strict=True))
        return [own / theirs for own, theirs in pairs if theirs]

    def over(self, other: Row, metric: str) -> float:
        """Return the median of the `ratios`; NaN if there are none."""
        found = self.ratios(other, metric)
        return statistics.median(found) if found else float("nan")

    def spread(self, metric: str) -> float:
        """Return (highest - lowest) / median."""
        values = self.values(metric)
        middle = self.median(metric)
        return (max(values) - min(values)) / middle if values and middle else float("nan")

    def metrics(self) -> list[str]:
        """Return the names of everything that a median can be taken of; none without runs."""
        if not self.runs:
            return []
        facts = self.runs[0].facts.items()
        return [*METRICS, *(key for key, value in facts if isinstance(value, int | float))]
