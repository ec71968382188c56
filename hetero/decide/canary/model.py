"""The result of canary training, as ``canary.json`` contains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hetero.decide.canary.points import CanaryPoint
from hetero.documents.records import limits, load
from hetero.metrics.figures import BASES

__all__ = [
    "CANARY_FILE_NAME",
    "RULES",
    "SCHEMA_VERSION",
    "CanaryReport",
    "Candidate",
    "Decision",
    "ForecastFigure",
    "Refusal",
    "load_canary",
]

SCHEMA_VERSION = 3
"""Version of ``canary.json``. Since version 3 it has no `canary_s`."""
CANARY_FILE_NAME = "canary.json"
RULES = (
    *("failed", "too-few", "curved", "no-growth", "noise", "fixed-steps", "passes", "short-passes", "cache"),
    *("cpu-cache", "loaders", "busy"),
)
"""Names of the reasons to refuse a forecast. `hetero canary --accept RULE` turns one off, except `too-few`."""
_COMPUTED_FROM = {
    "cost": "time",
    "memory mean": "memory peak",
    "memory p99": "memory peak",
    "GPU memory mean": "GPU memory peak",
    "GPU memory p99": "GPU memory peak",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastFigure:
    """One figure of the whole job, with its 90 % prediction interval."""

    name: str
    """For example ``time``, ``cost`` or ``memory peak``."""
    unit: str
    basis: str = field(metadata=limits(choices=BASES))
    """Origin of the canaries' measurements. The forecast itself is always modelled from them."""
    value: float
    low: float
    high: float
    fixed: float | None = None
    """Part of the value that does not grow with the data."""
    points: tuple[float, ...] = ()
    """The figure in each canary run, in the order of the candidate's points. Empty for a figure without a line."""

    @property
    def half_width(self) -> float:
        """Half of the interval as a share of the value."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason why the forecast of a figure must not be trusted."""

    rule: str = field(metadata=limits(choices=RULES))
    figure: str
    """Name of the figure. Empty for all figures."""
    reason: str
    """One sentence, with the numbers that show it."""

    def __post_init__(self) -> None:
        assert self.rule in RULES, f"rule {self.rule!r} is not in RULES, so canary.json could not be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cluster with its canary runs, and their forecast, which `hetero.decide.canary.forecast` adds."""

    name: str
    """For example ``6 x ml.m5.4xlarge``."""
    groups: tuple[str, ...]
    """The instance groups, each ``NAME=TYPE:COUNT``."""
    hourly_usd: float | None = None
    points: tuple[CanaryPoint, ...]
    """All canary runs, including failed ones."""
    figures: tuple[ForecastFigure, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    memory_limit_bytes: float | None = None
    """Memory of one host. None if it is unknown."""
    data_bytes: float | None = None
    """Bytes of the whole data. None if they are unknown."""
    cache_bytes: float | None = None
    """Level 2 caches of all CPUs of the machine that ran the canaries. None if they are unknown."""
    out_of_memory: float | None = field(default=None, metadata=limits(maximum=1.0))
    """Probability that a host needs more memory than it has. None without a limit, or if the memory was refused."""
    canary_share: float | None = None
    """`canary_s` as a share of the whole job's forecast time. None if the time was refused."""
    more_canaries: str = ""
    """What more canary runs would tell."""

    @property
    def canary_s(self) -> float:
        """Time of all canary runs together."""
        return sum(point.wall_s for point in self.points)

    def figure(self, name: str) -> ForecastFigure | None:
        """Return a figure by its name, or None."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def refused(self, name: str) -> tuple[Refusal, ...]:
        """Return the reasons against a figure, against the figure that it is computed from, and against all figures."""
        names = (name, _COMPUTED_FROM.get(name, name), "")
        return tuple(refusal for refusal in self.refusals if refusal.figure in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which of several candidates is the cheapest."""

    cheapest: str
    """Name of the candidate. Empty if it is not decided."""
    probability: float = field(metadata=limits(maximum=1.0))
    """Probability that the most probable candidate is the cheapest."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """The whole result."""

    schema_version: int = field(metadata=limits(minimum=SCHEMA_VERSION, maximum=SCHEMA_VERSION))
    command: str
    """The training script and its arguments."""
    how: str
    """How the data was reduced, in one sentence."""
    candidates: tuple[Candidate, ...]
    decision: Decision | None = None


def load_canary(path: str | Path) -> CanaryReport:
    """Read ``canary.json``.

    Args:
        path: The file, or the directory that contains it.

    Raises:
        ConfigError: If the file is missing or malformed. The message names the file and the key path.
    """
    to_do = "pass canary.json or its directory, written by this version of hetero"
    return load(CanaryReport, path, CANARY_FILE_NAME, to_do=to_do)
