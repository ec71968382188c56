"""The runs of a canary study: which fraction of which data each gets. Files are linked, nothing is executed."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetero.canary.files import DataFile, choose_files, data_files, link_files
from hetero.canary.refusals import percent
from hetero.errors import ConfigError
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE
from hetero.loaders.parts import FRACTION_VARIABLE, PART_SEED_VARIABLE
from hetero.studies.runs import PlannedRun
from hetero.system.text import counted

__all__ = [
    "CanaryRequest",
    "Cluster",
    "PlannedCanary",
    "cluster_name",
    "how_text",
    "parse_fractions",
    "plan_canaries",
    "run_name",
]

_PLACEHOLDER = re.compile(r"\{(fraction|samples)\}")
_FRACTION = re.compile(r"(\d+(?:\.\d+)?)\s*%")
MAX_FRACTION = 0.5
MAX_RUNS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A candidate: the hosts of the job."""

    groups: tuple[str, ...]
    """Instance groups as ``NAME=TYPE:COUNT``."""

    @property
    def name(self) -> str:
        """For example ``6 x ml.m5.4xlarge``."""
        return cluster_name(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRequest:
    """What `hetero canary` was asked for.

    Raises:
        ConfigError: If values contradict each other or are out of their bounds.
    """

    script: str
    script_path: Path | None = None
    """File of the script. None if it is not known. Runs of a script that has changed since are rejected."""
    script_args: tuple[str, ...] = ()
    clusters: tuple[Cluster, ...]
    fractions: tuple[float, ...] = (0.01, 0.02, 0.03)
    """Fractions of the data, each in (0, 0.5]."""
    repeats: int = 3
    """Runs of each fraction, 1 to 50."""
    channels: Mapping[str, Path] = field(default_factory=dict)
    """Folder of each input channel by its name."""
    whole_channels: frozenset[str] = frozenset()
    """Channels that every run gets as they are, for example a validation set."""
    keep: tuple[str, ...] = ()
    """Patterns of files that every run gets, see `hetero.canary.files.data_files`."""
    by_samples: bool = False
    """Whether hetero's loaders use a fraction of their samples, instead of a fraction of the files."""
    whole_samples: int | None = None
    """Samples of the whole job, for ``{samples}`` in the script's arguments."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Launch options by name."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.clusters:
            raise ConfigError("no cluster is given; expected for example --group trainer=ml.m5.xlarge:1")
        if not self.fractions or not all(0 < fraction <= MAX_FRACTION for fraction in self.fractions):
            shown = ", ".join(percent(fraction) for fraction in self.fractions) or "none"
            raise ConfigError(f"--fractions are {shown}; expected one or more above 0 % and at most 50 %")
        if len(set(self.fractions)) != len(self.fractions) or len(self.fractions) < 2:
            raise ConfigError("--fractions: expected at least two different fractions, because one point is no line")
        if not 1 <= self.repeats <= 50 or self.repeats * len(self.fractions) * len(self.clusters) > MAX_RUNS:
            raise ConfigError(f"--repeats is {self.repeats}; expected 1 to 50, and at most {MAX_RUNS} runs in all")
        self._check_way()

    def _check_way(self) -> None:
        """Raise unless exactly one way to reduce the data is given."""
        unknown = sorted(self.whole_channels - set(self.channels))
        if unknown:
            raise ConfigError(f"--whole {unknown[0]}: there is no such channel; give --channel {unknown[0]}=DIR too")
        placeholders = self.placeholders
        ways = {
            "--channel NAME=DIR": bool(set(self.channels) - self.whole_channels),
            "--samples": self.by_samples,
            "{fraction} or {samples} in the script's arguments": bool(placeholders),
        }
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(
                f"one way to reduce the data is needed, found {found}\n"
                f"  to do: give one of {'; '.join(ways)}\n"
                "  A channel that every run gets whole: --whole NAME"
            )
        if "samples" in placeholders and not self.whole_samples:
            raise ConfigError("{samples} needs the number of samples of the whole job; give --whole-samples N")

    @property
    def placeholders(self) -> set[str]:
        """The placeholders in the script's arguments."""
        return {match[1] for text in self.script_args for match in _PLACEHOLDER.finditer(text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCanary:
    """One canary run."""

    run: PlannedRun
    cluster: Cluster
    fraction: float
    """Share of the data that the run really gets."""
    files: tuple[Path, ...] = ()
    """The files that it gets, if it gets a part of the files."""


def parse_fractions(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the fractions in texts such as ``1%`` or ``0.5%``.

    Raises:
        ConfigError: If a text has another form.
    """
    found = []
    for text in texts:
        match = _FRACTION.fullmatch(text)
        if match is None:
            raise ConfigError(f"--fractions {text!r}: expected a number with a percent sign, for example 2%")
        found.append(float(match[1]) / 100)
    return tuple(found)


def cluster_name(groups: Sequence[str]) -> str:
    """Return a name for groups ``NAME=TYPE:COUNT``, for example ``6 x ml.m5.4xlarge``."""
    parts = [text.partition("=")[2].rpartition(":") for text in groups]
    return " + ".join(f"{count} x {instance_type}" for instance_type, _, count in parts)


def run_name(number: int, fraction: float, replicate: int) -> str:
    """Return the name of a run. It begins with its number, because names of SageMaker jobs are made from that."""
    return f"{number:03d}-fraction={100 * fraction:g}pc-r{replicate}"


def how_text(request: CanaryRequest) -> str:
    """Return how the data is reduced, in one sentence."""
    if request.by_samples:
        return "hetero's loaders use a fraction of their samples, chosen at random."
    if request.placeholders:
        names = " and ".join(f"{{{name}}}" for name in sorted(request.placeholders))
        return f"The script's arguments {names} say how much data it uses."
    names = ", ".join(sorted(set(request.channels) - request.whole_channels))
    return f"Each run gets a fraction of the files of {names}. Fractions are shares of the bytes."


def plan_canaries(request: CanaryRequest, folder: Path) -> tuple[list[PlannedCanary], float | None]:
    """Plan the runs, and link their files into ``folder``.

    Args:
        request: The request.
        folder: Folder of the study.

    Returns:
        The runs in the order of their execution, and the bytes of the whole data if they are known. The order is
        random, so that a machine that becomes slower does not look like growth.

    Raises:
        ConfigError: If a channel has no files, or the smallest fraction is less than one of them.
    """
    source = _Files(request) if set(request.channels) - request.whole_channels else None
    cells = itertools.product(request.clusters, request.fractions, range(1, request.repeats + 1))
    found = [
        _planned(request, cluster, run_name(number, fraction, replicate), fraction, replicate, folder, source)
        for number, (cluster, fraction, replicate) in enumerate(cells, start=1)
    ]
    if source is not None and len({round(each.fraction, 6) for each in found}) < 2:
        raise ConfigError(
            f"the channels have {counted(source.num_files, 'file')}, and whole files give all runs the same data\n"
            "  to do: divide the data into more files, give larger --fractions, or reduce samples with --samples"
        )
    return _ordered(found, request), None if source is None else source.num_bytes


def _ordered(found: Sequence[PlannedCanary], request: CanaryRequest) -> list[PlannedCanary]:
    """Return the runs in the order of their execution.

    The first runs of each cluster have all fractions, and the smallest one again. They suffice for a first forecast,
    see `hetero.canary.conducting.run_canaries`. The order is random within these and within the rest.
    """
    smallest = min(request.fractions)
    draw = random.Random(request.seed)
    first = [
        each
        for each in found
        if each.run.replicate == 1 or (each.run.replicate == 2 and each.run.levels["fraction"] == smallest)
    ]
    rest = [each for each in found if each not in first]
    draw.shuffle(first)
    draw.shuffle(rest)
    return [*first, *rest]


class _Files:
    """The files of the channels that are reduced."""

    def __init__(self, request: CanaryRequest) -> None:
        names = sorted(set(request.channels) - request.whole_channels)
        self._found = {name: data_files(request.channels[name], keep=request.keep) for name in names}
        self._request = request
        self.num_files = sum(len(files) for files, _ in self._found.values())
        self.num_bytes = float(sum(file.num_bytes for files, _ in self._found.values() for file in files))

    def link(
        self, fraction: float, replicate: int, min_files: int, target: Path
    ) -> tuple[float, dict[str, str], tuple[Path, ...]]:
        """Link a part of the files. Return its real share of the bytes, the folders, and the files."""
        chosen_bytes = 0
        folders: dict[str, str] = {}
        paths: list[Path] = []
        for name, (files, kept) in self._found.items():
            chosen: list[DataFile] = choose_files(
                files, fraction, seed=self._request.seed, replicate=replicate - 1, min_files=min_files
            )
            chosen_bytes += sum(file.num_bytes for file in chosen)
            source = self._request.channels[name]
            link_files(source, [*chosen, *kept], target / name)
            folders[name] = str((target / name).resolve())
            paths += [source / file.name for file in chosen]
        return chosen_bytes / max(1.0, self.num_bytes), folders, tuple(paths)


def _planned(
    request: CanaryRequest,
    cluster: Cluster,
    run_id: str,
    fraction: float,
    replicate: int,
    folder: Path,
    source: _Files | None,
) -> PlannedCanary:
    """Return one run, with its links made."""
    observations = folder / "observed" / run_id
    observations.mkdir(parents=True, exist_ok=True)
    environment = {CANARY_DIR_VARIABLE: str(observations.resolve())}
    channels = {name: str(path.resolve()) for name, path in request.channels.items()}
    real = fraction
    files: tuple[Path, ...] = ()
    if source is not None:
        num_hosts = sum(int(text.rpartition(":")[2]) for text in cluster.groups)
        real, folders, files = source.link(fraction, replicate, num_hosts, folder / "data" / run_id)
        channels |= folders
    elif request.by_samples:
        environment |= {FRACTION_VARIABLE: repr(fraction), PART_SEED_VARIABLE: str(request.seed * 1000 + replicate)}
    samples = None if request.whole_samples is None else max(1, round(fraction * request.whole_samples))
    if samples is not None and request.whole_samples and "samples" in request.placeholders:
        real = samples / request.whole_samples
    values = {"fraction": f"{fraction:g}", "samples": str(samples)}
    run = PlannedRun(
        run_id=run_id,
        levels={"cluster": cluster.name, "fraction": fraction},
        replicate=replicate,
        script=request.script,
        script_args=tuple(_PLACEHOLDER.sub(lambda match: values[match[1]], text) for text in request.script_args),
        groups=cluster.groups,
        channels=channels,
        options=request.options,
        environment=environment,
    )
    return PlannedCanary(run=run, cluster=cluster, fraction=real, files=files)
