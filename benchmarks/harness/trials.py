"""What is compared, `Competitor`, `Job` and `Trial`, and what was found, `Run` and `Row`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Competitor:
    """One way to feed a trainer. It is created in the trainer process. Subclasses override the methods.

    Args:
        config: The trial's `Trial.config`, JSON values.
    """

    min_warmup_s = 0.2
    """Shortest warm-up of each run, even with few warm-up batches. Sockets hold hundreds of small batches, and some
    supplies need seconds until they are at full speed."""
    pauses = False
    """Whether its supply would go on computing after a run. Then each run gets a new iterator of batches."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def start(self) -> None:
        """Start the processes that compute batches, and connect to them."""

    def batches(self) -> Iterator[Any]:
        """Yield batches without end, for one consumer."""
        raise NotImplementedError

    def consume(self, batch: Any) -> tuple[int, int]:
        """Use one batch as a trainer would. Return its number of samples and bytes."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """Handle the end of the warm-up."""

    def facts(self) -> dict[str, Any]:
        """Return more facts for the row. Called after a run, and not measured."""
        return {}

    def stop(self) -> None:
        """End what `start` started."""


class Job:
    """A way to feed a trainer that another program starts, such as Ray Train. The harness's process is its driver.

    Subclasses override the methods. The job's trainer process calls `harness.run_once`, which measures that process.

    Args:
        config: The trial's `Trial.config`, JSON values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def start(self) -> None:
        """Prepare the driver."""

    def run(self, command: Mapping[str, Any]) -> Run:
        """Run the job once and return what its trainer process measured.

        Args:
            command: ``seconds``, ``warmup_batches`` and ``min_batches`` of the protocol, for `harness.run_once`.
        """
        raise NotImplementedError

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
    """CPU seconds of all threads of the trainer process."""
    supply_cpu_s: float
    """CPU seconds of all its descendants."""
    trainer_peak_bytes: int
    """Largest resident memory while measuring."""
    trainer_growth_bytes: int
    """The peak minus the resident memory before the competitor started."""
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

    @property
    def samples_per_supply_cpu_s(self) -> float:
        """Samples per CPU-second of the supply."""
        return self.num_samples / self.supply_cpu_s if self.supply_cpu_s else 0.0

    def value(self, metric: str) -> float:
        """Return an attribute, property or fact by the name that a table or a plot uses."""
        return float(self.facts[metric] if metric in self.facts else getattr(self, metric))


METRICS = (
    *("batches_per_s", "samples_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
    *("first_batch_s", "trainer_peak_bytes", "trainer_growth_bytes", "supply_bytes", "samples_per_supply_cpu_s"),
)
"""Metrics of every run. Facts are added to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row to be: a competitor and its configuration."""

    competitor: str
    """Key of `dispatch`'s competitors."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the competitor. Trials of equal ``group`` are compared with each other."""
    group: str = ""
    title: str = ""
    """Name in the table. The default is the competitor's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the trainer process's."""
    basis: str = "measured"
    """Or ``simulated``."""
    fresh: bool | None = None
    """Whether every round starts new processes. None: as the protocol says."""
    start_s: float = 3.0
    """Estimate of start, first batch and stop together. Only the announcement uses it."""
    warmup_s: float = 0.5
    """Estimate of the time of a run that is not measured, such as the warm-up. Only the announcement uses it."""

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
    """Why runs are missing. Empty if all runs succeeded."""

    def median(self, metric: str) -> float:
        """Return the median of an attribute or fact of the runs. NaN without runs."""
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
        """Return the median of the `ratios`. NaN without ratios."""
        found = self.ratios(other, metric)
        return statistics.median(found) if found else float("nan")

    def spread(self, metric: str) -> float:
        """Return (highest - lowest) / median."""
        values = self.values(metric)
        middle = self.median(metric)
        return (max(values) - min(values)) / middle if values and middle else float("nan")

    def metrics(self) -> list[str]:
        """Return the names of all metrics that have a median. Empty without runs."""
        if not self.runs:
            return []
        facts = self.runs[0].facts.items()
        return [*METRICS, *(key for key, value in facts if isinstance(value, int | float))]
