"""The runs of a canary study: the data and the fraction that each gets. Files are linked, nothing is executed."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetero.decide.canary.files import LinkedFolder, choose_files, data_files, link_files, matches
from hetero.decide.canary.line import num_distinct
from hetero.decide.canary.points import MAX_FRACTION, MIN_FRACTIONS, MIN_RUNS
from hetero.decide.canary.refusals import percent
from hetero.decide.studies.runs import PlannedRun
from hetero.decide.studies.study_file import PRICE_OPTIONS
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE
from hetero.loaders.parts import FRACTION_VARIABLE, PART_SEED_VARIABLE
from hetero.simulate.opt_ml import CHANNEL_NAME

__all__ = [
    "MAX_RUNS",
    "CanaryRequest",
    "Cluster",
    "PlannedCanary",
    "check_fractions",
    "check_real",
    "check_repeats",
    "cluster_name",
    "data_folder",
    "how_text",
    "parse_fractions",
    "plan_canaries",
    "run_name",
]

_PLACEHOLDER = re.compile(r"\{(fraction|samples)\}")
_FRACTION = re.compile(r"(\d+(?:\.\d+)?)\s*%")
MAX_RUNS = 200
_MIN_SPREAD = 2.0
"""Largest fraction / smallest fraction, at least."""
_MORE_PARTS = "divide the data into more files, give larger --fractions, or reduce samples with --samples"


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
    """Patterns of files that every run gets, see `hetero.decide.canary.files.data_files`."""
    by_samples: bool = False
    """Whether hetero's loaders use a fraction of their samples, instead of a fraction of the files."""
    whole_samples: int | None = None
    """Samples of the whole job, for ``{samples}`` in the script's arguments."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Launch options by name."""
    as_fast_as: frozenset[str] = frozenset()
    """Instance types that are as fast as this machine. The costs of other simulated hosts are not known, unless vCPUs
    and accelerators are emulated."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.clusters:
            raise ConfigError("no cluster is given; expected for example --group trainer=ml.m5.xlarge:1")
        twice = next((each for each in self.clusters if self.clusters.count(each) > 1), None)
        if twice is not None:
            raise ConfigError(f"--candidate {','.join(twice.groups)} is given twice; expected different clusters")
        check_fractions(self.fractions)
        check_repeats(self.repeats, len(self.fractions), len(self.clusters))
        for name in self.channels:
            if not CHANNEL_NAME.fullmatch(name):
                raise ConfigError(
                    f"--channel {name!r:.80}: expected a name of 1 to 64 letters, digits and . _ - that starts with a "
                    "letter, a digit or _"
                )
        self._check_way()

    def _check_way(self) -> None:
        """Raise `ConfigError` unless exactly one way to reduce the data is given, with the options that it needs."""
        unknown = sorted(self.whole_channels - set(self.channels))
        if unknown:
            raise ConfigError(f"--whole {unknown[0]}: unknown channel; give --channel {unknown[0]}=DIR too")
        ways = {
            "--channel NAME=DIR": bool(self.divided_channels),
            "--samples": self.by_samples,
            "{fraction} or {samples} in the script's arguments": bool(self.placeholders),
        }
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(
                f"one way to reduce the data is needed, found {found}\n"
                f"  to do: give one of {'; '.join(ways)}\n"
                "  A channel that every run gets whole: --whole NAME"
            )
        if "samples" in self.placeholders and not self.whole_samples:
            raise ConfigError("{samples} needs the number of samples of the whole job; give --whole-samples N")
        if self.whole_samples is not None and "samples" not in self.placeholders:
            raise ConfigError("--whole-samples needs {samples} in the script's arguments; add that, or leave it out")
        if self.keep and not self.divided_channels:
            raise ConfigError("--keep needs a channel that is reduced; give --channel NAME=DIR, or leave it out")

    @property
    def divided_channels(self) -> list[str]:
        """Channels whose files are divided: each run gets a fraction of them. Sorted."""
        return sorted(set(self.channels) - self.whole_channels)

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
    links: tuple[LinkedFolder, ...] = ()
    """Folders with the files that it gets, if it gets a part of the files."""

    def link(self, folder: Path) -> None:
        """Make the folders. No other study may write to the folder of the study at the same time.

        Args:
            folder: Folder of the study.

        Raises:
            ConfigError: If a folder cannot be made, see `hetero.decide.canary.files.link_files`.
        """
        for linked in self.links:
            link_files(linked, within=data_folder(folder))


def data_folder(folder: Path) -> Path:
    """Return the folder of a study's links."""
    return folder / "data"


def check_fractions(fractions: Sequence[float], name: str = "--fractions") -> None:
    """Raise `ConfigError` unless a forecast can be made from these fractions. Messages call them ``name``."""
    shown = ", ".join(percent(fraction) for fraction in fractions) or "none"
    if not fractions or not all(0 < fraction <= MAX_FRACTION for fraction in fractions):
        raise ConfigError(f"{name} are {shown}; expected each above 0 % and at most {percent(MAX_FRACTION)}")
    # To give a fraction twice is a mistake, because --repeats gives more runs of a fraction.
    if len(set(fractions)) != len(fractions):
        raise ConfigError(f"{name} are {shown}; expected different ones")
    # Fractions that are nearly equal do not count as different ones.
    _check_distinct(fractions, f"{name} are {shown}")
    # Runs whose fractions are close to each other hardly show which part of the time grows.
    if max(fractions) < _MIN_SPREAD * min(fractions):
        raise ConfigError(f"{name} are {shown}; expected the largest to be at least {_MIN_SPREAD:g} times the smallest")


def check_repeats(repeats: int, num_fractions: int, num_clusters: int, name: str = "--repeats") -> None:
    """Raise `ConfigError` unless the number of runs is in its bounds. Messages call the repeats ``name``."""
    if not 1 <= repeats <= 50 or repeats * num_fractions * num_clusters > MAX_RUNS:
        raise ConfigError(f"{name} is {repeats}; expected 1 to 50, and at most {MAX_RUNS} runs in all")
    if repeats * num_fractions < MIN_RUNS:
        raise ConfigError(
            f"{name} is {repeats}, which gives each cluster {repeats * num_fractions} runs; a forecast needs at "
            f"least {MIN_RUNS}"
        )


def check_real(fractions: Sequence[float], what: str, to_do: str = _MORE_PARTS) -> None:
    """Raise `ConfigError` unless a forecast can be made from the fractions that the runs really get.

    A run gets whole files or samples, so its real fraction differs from the planned one.

    Args:
        fractions: Real fraction of each run of a cluster.
        what: How many files or samples there are, for example ``the channels have 3 files``.
        to_do: What to do about it.
    """
    shown = ", ".join(dict.fromkeys(percent(fraction) for fraction in sorted(fractions)))
    _check_distinct(fractions, f"{what}, of which whole ones give the runs {shown} of the data", f"\n  to do: {to_do}")


def _check_distinct(fractions: Sequence[float], found: str, to_do: str = "") -> None:
    """Raise `ConfigError` if too few fractions differ by a tenth or more. The message begins with ``found``."""
    if num_distinct(fractions) < MIN_FRACTIONS:
        raise ConfigError(
            f"{found}; expected at least {MIN_FRACTIONS} that differ by a tenth or more\n"
            f"  Two points cannot show whether growth is a line.{to_do}"
        )


def parse_fractions(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the fractions in texts such as ``1%`` or ``0.5%``.

    Raises:
        ConfigError: If a text has another form.
    """
    found = []
    for text in texts:
        match = _FRACTION.fullmatch(text)
        if match is None:
            raise ConfigError(f"--fractions {text!r:.40}: expected a number with a percent sign, for example 2%")
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
    names = ", ".join(request.divided_channels)
    return f"Each run gets a fraction of the files of {names}. Fractions are shares of the bytes."


def plan_canaries(request: CanaryRequest, folder: Path) -> tuple[list[PlannedCanary], float | None]:
    """Plan the runs. Nothing is written: `PlannedCanary.link` makes the links of a run.

    Args:
        request: The request.
        folder: Folder of the study.

    Returns:
        The runs in the order of their execution, and the bytes of the whole data if they are known. The order is
        random, because a machine that becomes slower would look like growth.

    Raises:
        ConfigError: If a channel is empty, or has too few files for different fractions.
    """
    for name, path in request.channels.items():
        if not path.is_dir():
            raise ConfigError(f"--channel {name}={path}: the folder does not exist; expected the files of the channel")
    source = _Files(request) if request.divided_channels else None
    # Number the runs by replicate first, because more replicates must not change the names of the other runs.
    combinations = itertools.product(range(1, request.repeats + 1), request.clusters, request.fractions)
    planned = [
        _planned(request, cluster, run_name(number, fraction, replicate), fraction, replicate, folder, source)
        for number, (replicate, cluster, fraction) in enumerate(combinations, start=1)
    ]
    # Files and samples are whole, so the real fractions may be too close to each other for a forecast.
    for cluster in request.clusters:
        real_fractions = [each.fraction for each in planned if each.cluster == cluster]
        if source is not None:
            check_real(real_fractions, f"the channels have {counted(source.num_files, 'file')}")
        elif request.whole_samples is not None:
            check_real(real_fractions, f"the job has {counted(request.whole_samples, 'sample')}")
    return _ordered(planned, request), None if source is None else source.num_bytes


def _ordered(planned: Sequence[PlannedCanary], request: CanaryRequest) -> list[PlannedCanary]:
    """Return the runs in the order of their execution.

    The first runs of each cluster suffice for a forecast if the budget or the user ends the study. They have each
    fraction once, and the smallest one twice. With three fractions, these are the `MIN_RUNS` that a forecast needs, and
    a run of the smallest fraction takes the least time. The order of the first runs is random, and so is the order of
    the rest.
    """
    smallest = min(request.fractions)
    generator = random.Random(request.seed)
    first: list[PlannedCanary] = []
    rest: list[PlannedCanary] = []
    for each in planned:
        replicate, planned_fraction = each.run.replicate, each.run.levels["fraction"]
        is_first = replicate == 1 or (replicate == 2 and planned_fraction == smallest)
        (first if is_first else rest).append(each)
    generator.shuffle(first)
    generator.shuffle(rest)
    return [*first, *rest]


class _Files:
    """The files of the channels that are divided, without the files that every run gets.

    A fraction is a share of these files. Files that every run gets, such as labels, do not count in it, because the
    whole job gets the same ones as a canary.
    """

    def __init__(self, request: CanaryRequest) -> None:
        names = request.divided_channels
        self._divided_and_kept = {name: data_files(request.channels[name], keep=request.keep) for name in names}
        kept_names = [file.name for _, kept in self._divided_and_kept.values() for file in kept]
        unused = next((each for each in request.keep if not any(matches(name, [each]) for name in kept_names)), None)
        if unused is not None:
            raise ConfigError(f"--keep {unused!r:.80}: no file of {', '.join(names)} has such a name")
        self._request = request
        divided = [file for files, _ in self._divided_and_kept.values() for file in files]
        self.num_files = len(divided)
        self.num_bytes = float(sum(file.num_bytes for file in divided))

    def part(
        self, fraction: float, replicate: int, min_files: int, target: Path
    ) -> tuple[float, dict[str, LinkedFolder]]:
        """Choose a part of the files.

        Args:
            fraction: Share of the bytes to choose.
            replicate: Number of the run among those with the same fraction, from 1.
            min_files: Fewest files of each channel.
            target: Folder for the links, with a folder for each channel.

        Returns:
            The real share of the bytes, and the folder of each channel with the chosen files and those that every run
            gets.
        """
        request, chosen_bytes, folders = self._request, 0, {}
        for name, (files, kept) in self._divided_and_kept.items():
            chosen = choose_files(files, fraction, seed=request.seed, replicate=replicate - 1, min_files=min_files)
            chosen_bytes += sum(file.num_bytes for file in chosen)
            folders[name] = LinkedFolder(source=request.channels[name], target=target / name, files=(*chosen, *kept))
        # Files without bytes must not divide by zero.
        return chosen_bytes / max(1.0, self.num_bytes), folders


def _planned(
    request: CanaryRequest,
    cluster: Cluster,
    run_id: str,
    fraction: float,
    replicate: int,
    folder: Path,
    source: _Files | None,
) -> PlannedCanary:
    """Return one run, with the fraction of the data that it really gets.

    Args:
        request: The request.
        cluster: Hosts of the run.
        run_id: Its name.
        fraction: The planned fraction.
        replicate: Number of the run among those with the same fraction, from 1.
        folder: Folder of the study.
        source: The files to divide. None if the request reduces the data in another way.
    """
    observations = folder / "observed" / run_id
    environment = {CANARY_DIR_VARIABLE: str(observations.resolve())}
    channels = {name: str(path.resolve()) for name, path in request.channels.items()}
    # Files and samples are whole, so the real fraction of a run may differ from the planned one.
    real_fraction = fraction
    folders: dict[str, LinkedFolder] = {}
    if source is not None:
        # Each host of the job needs a different file.
        num_hosts = sum(int(text.rpartition(":")[2]) for text in cluster.groups)
        real_fraction, folders = source.part(fraction, replicate, num_hosts, data_folder(folder) / run_id)
        channels |= {name: str(linked.target.resolve()) for name, linked in folders.items()}
    elif request.by_samples:
        # Each replicate gets other samples. There are fewer than 1,000 replicates, so no other seed of a request gives
        # the same number. The run's loaders report the fraction that they really use.
        part_seed = request.seed * 1000 + replicate
        environment |= {FRACTION_VARIABLE: repr(fraction), PART_SEED_VARIABLE: str(part_seed)}
    values = {"fraction": f"{fraction:g}"}
    # The number of all samples is given if and only if {samples} is in the arguments.
    if request.whole_samples is not None:
        samples = max(1, round(fraction * request.whole_samples))
        real_fraction = samples / request.whole_samples
        values["samples"] = str(samples)
    run = PlannedRun(
        run_id=run_id,
        levels={"cluster": cluster.name, "fraction": fraction},
        replicate=replicate,
        script=request.script,
        script_args=tuple(_PLACEHOLDER.sub(lambda match: values[match[1]], text) for text in request.script_args),
        groups=cluster.groups,
        channels=channels,
        # Leave out the prices. They change no run, so runs with other prices can be used again.
        options={name: value for name, value in request.options.items() if name not in PRICE_OPTIONS},
        environment=environment,
    )
    return PlannedCanary(run=run, cluster=cluster, fraction=real_fraction, links=tuple(folders.values()))
