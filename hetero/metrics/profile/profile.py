"""A profile: what `hetero profile` measures about a training job within a minute. The file ``profile.json`` has one.

A plan needs no other facts about the job. Every number states its unit and its basis: it was measured, measured with an
emulated part (simulated), or computed from other figures (modelled).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetero.documents.files import write_text
from hetero.documents.records import decode, encode, json_text, limits, load
from hetero.errors import ConfigError
from hetero.metrics.figures import BASES, Figure

__all__ = [
    "NEARLY_BUSY",
    "PROFILE_FILE_NAME",
    "SCHEMA_VERSION",
    "CodecProfile",
    "ConcurrencyPoint",
    "LeafProfile",
    "Profile",
    "Spread",
    "SupplyProfile",
    "TrainingProfile",
    "check_figures",
    "evenly_spaced",
    "load_profile",
    "write_profile",
]

SCHEMA_VERSION = 1
PROFILE_FILE_NAME = "profile.json"
NEARLY_BUSY = 0.05
"""Share of a step that waits for data below which the accelerators count as busy."""
MAX_VALUES = 1024
"""Limit of the measured values that a `Spread` keeps."""

# The limits are far above what a real job needs. The least time keeps plans from a division by 0.
_MAX_S = 86_400.0
"""A day, for a step, a sample, or the build of a data set."""
_LEAST_TIME_S = 1e-9
_MAX_SAMPLE_BYTES = 1e12
_FIGURES = {
    "rank_cpu_cores": ("CPU", 4096.0),
    "receive_cpu_s_per_gb": ("s/GB", 10_000.0),
    "gpu_percent": ("%", 100.0),
    "endpoint_private_bytes": ("B", 1e14),
    "endpoint_shared_bytes": ("B", 1e14),
    "build_s": ("s", _MAX_S),
    "storage_bytes_per_sample": ("B", _MAX_SAMPLE_BYTES),
    "wire_bytes_per_sample": ("B", _MAX_SAMPLE_BYTES),
}
"""Unit and largest value of each `Figure` of a profile. A `Figure` itself may have any unit."""
_TO_DO = "\n  to do: run hetero profile again"


def evenly_spaced(values: Sequence[float], max_values: int) -> tuple[float, ...]:
    """Return all values, or ``max_values`` of them at equal distances.

    The values stay in the order of the run, because a plan divides them into successive parts. From the means of the
    parts, the plan computes the error of the mean of all values
    (`hetero.decide.planning.steps.uncertain.error_of_mean`).
    """
    number = min(len(values), max_values)
    return tuple(values[int(index * len(values) / number)] for index in range(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of a measured time. `of` creates one from the measured values."""

    unit: str = field(metadata=limits(choices=("s",)))
    basis: str = field(metadata=limits(choices=BASES))
    """``measured`` on this hardware, ``simulated`` (measured with an emulated part), or ``modelled`` (computed)."""
    num_measured: int = field(metadata=limits(minimum=1))
    """Number of measured values."""
    mean: float = field(metadata=limits(maximum=_MAX_S))
    p50: float
    p95: float
    variation: float
    """Coefficient of variation: standard deviation / mean. 0 if the mean is 0."""
    values: tuple[float, ...] = field(metadata=limits(min_items=1, max_items=MAX_VALUES, maximum=_MAX_S))
    """The measured values in order, or 1,024 of them at equal distances. The planner resamples them."""

    @classmethod
    def of(cls, values: Iterable[float], unit: str, basis: str) -> Spread:
        """Return the distribution of at least one value.

        Raises:
            ConfigError: If values are missing, or one is not finite or below 0.
        """
        found = list(values)
        if not found or not all(math.isfinite(value) and value >= 0 for value in found):
            raise ConfigError(f"found {len(found)} values in {unit}; expected at least one, all finite and at least 0")
        mean = statistics.fmean(found)
        ordered = sorted(found)
        return cls(
            unit=unit,
            basis=basis,
            num_measured=len(found),
            mean=mean,
            # Percentiles are measured values. An interpolated value was never measured.
            p50=ordered[(len(ordered) - 1) // 2],
            p95=ordered[math.ceil(0.95 * len(ordered)) - 1],
            variation=statistics.pstdev(found) / mean if mean else 0.0,
            values=evenly_spaced(found, MAX_VALUES),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyPoint:
    """Throughput of a number of processes that preprocess at the same time on one host."""

    num_processes: int = field(metadata=limits(minimum=1, maximum=4096))
    samples_per_s: float = field(metadata=limits(minimum=1 / _MAX_S, maximum=1 / _LEAST_TIME_S))
    """Samples per second of all processes together."""
    cpu_s_per_sample: float = field(metadata=limits(minimum=_LEAST_TIME_S, maximum=_MAX_S))
    """CPU seconds per sample. It grows with the number of processes if they share memory bandwidth or cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupplyProfile:
    """What a sample costs on one type of host. None: the figure was not measured."""

    instance_type: str
    """Type of the host, or empty if unknown."""
    vcpus: int = field(metadata=limits(minimum=1, maximum=4096))
    """Usable (or emulated) CPUs of the host."""
    sample_cpu_s: Spread
    """CPU seconds of fetching one sample in one process that runs alone."""
    sample_wait_s: Spread
    """Wall time minus CPU time of fetching one sample, in seconds. It is mostly the wait for storage."""
    batch_cpu_s: Spread
    """CPU seconds per sample of collating and encoding a batch."""
    concurrency: tuple[ConcurrencyPoint, ...] = ()
    """Throughput with 1, 2, 4, ... processes in this order, up to one per CPU, or more if they wait for storage. Empty
    if not measured."""
    endpoint_private_bytes: Figure | None = None
    """Memory of one endpoint that no other process shares."""
    endpoint_shared_bytes: Figure | None = None
    """Memory that the endpoints of a host share."""
    build_s: Figure | None = None
    """Seconds to build the data set."""
    storage_bytes_per_sample: Figure | None = None
    """Bytes per sample that the processes read from storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafProfile:
    """One array of a batch."""

    path: str
    """Position in the batch, for example ``[0]`` or ``['image']``."""
    dtype: str
    bytes_per_sample: float = field(metadata=limits(maximum=_MAX_SAMPLE_BYTES))
    fits_uint8: bool = False
    """Whether all measured values are whole numbers from 0 to 255, or such numbers divided by 255, in a wider dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecProfile:
    """What a compression of `hetero.wire.compression` makes of the batches."""

    name: str = field(metadata=limits(choices=("lz4", "zstd")))
    ratio: float = field(metadata=limits(maximum=1.5))
    """Compressed size / size."""
    encode_cpu_s_per_sample: float = field(metadata=limits(maximum=_MAX_S))
    """CPU seconds of an endpoint."""
    decode_cpu_s_per_sample: float = field(metadata=limits(maximum=_MAX_S))
    """CPU seconds of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProfile:
    """What was measured in the ranks. Times belong to the slowest rank."""

    instance_type: str
    """Type of the trainer hosts, or empty if unknown."""
    vcpus: int = field(metadata=limits(minimum=1, maximum=4096))
    """Usable (or emulated) CPUs of a trainer host."""
    num_hosts: int = field(metadata=limits(minimum=1, maximum=100_000))
    ranks_per_host: int = field(metadata=limits(minimum=1, maximum=1024))
    batch_samples: int = field(metadata=limits(minimum=1, maximum=10**9))
    """Samples per step of one rank."""
    num_local_processes: int = field(default=0, metadata=limits(maximum=4096))
    """Processes per trainer host that fetched batches in this run. 0 if the ranks fetched in their own processes."""
    has_data_hosts: bool = False
    """Whether data hosts made batches of the measured steps. Then these are not steps of the trainer hosts alone."""
    headspace_s: Spread
    """Step time in seconds with batches always ready. No cluster makes steps shorter."""
    step_s: Spread
    """Step time in seconds as the job ran."""
    data_wait_s: Spread
    """Seconds per step that the rank waited for its batch, as the job ran."""
    excess_share: float = field(default=0.0, metadata=limits(maximum=1))
    """Largest share of these times that may be due to other work of the machine, see `hetero.metrics.excess`."""
    rank_cpu_cores: Figure | None = None
    """CPUs that one rank keeps busy in the headspace phase."""
    receive_cpu_s_per_gb: Figure | None = None
    """CPU seconds of a rank per 10^9 bytes received from endpoints."""
    steps_per_epoch: int | None = field(default=None, metadata=limits(minimum=1))
    requests_ahead: bool = False
    """Whether the first batches of an epoch are requested while the epoch before it ends. If so, no step waits for
    them. The profile run itself does not do this."""
    gpu_percent: Figure | None = None
    """NVML's utilisation in the headspace phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The figures of one job. Immutable.

    The schema of its JSON is ``hetero/metrics/profile/data/profile.schema.json``.
    """

    schema_version: int = field(metadata=limits(minimum=SCHEMA_VERSION, maximum=SCHEMA_VERSION))
    command: str
    """The training script and its arguments."""
    measured_at: str
    """ISO 8601 with time zone."""
    origin: str = field(metadata=limits(choices=("profile", "report")))
    """``profile``: `hetero profile` measured it. ``report``: it was derived from the report of a finished run."""
    training: TrainingProfile
    supply: tuple[SupplyProfile, ...] = field(metadata=limits(min_items=1, max_items=16))
    """One entry for each type of host that was measured. The first is the trainer hosts' type if it was measured."""
    leaves: tuple[LeafProfile, ...] = field(default=(), metadata=limits(max_items=1000))
    """Arrays of a batch. Empty if not measured."""
    wire_bytes_per_sample: Figure | None = None
    """Bytes of a sample on the network, with its share of the header. None if not measured."""
    codecs: tuple[CodecProfile, ...] = ()
    has_registered_dataset: bool = True
    """Whether data hosts can build the data set, because ``@hetero.dataset`` registers its factory."""
    simulated: tuple[str, ...] = ()
    """One sentence for each thing that was emulated."""
    notes: tuple[str, ...] = ()
    """One sentence for each figure that could not be measured, with the reason."""
    versions: dict[str, str] = field(default_factory=dict)


def check_figures(profile: Profile) -> None:
    """Check the figures of a profile, because a plan would divide by them or believe them.

    Raises:
        ConfigError: If a figure is out of range or has another unit, a step or a sample takes no time, or the numbers
            of processes of a measurement do not ascend. The message names the key path.
    """
    # Decoding checks the limits of all fields. A profile from a report, or made in Python, was not decoded before.
    try:
        decode(Profile, encode(profile))
    except ConfigError as error:
        raise ConfigError(f"the profile's {error}{_TO_DO}") from error
    training = profile.training
    # Records with figures, by the path of their keys in profile.json.
    supply = {f"supply[{index}].": each for index, each in enumerate(profile.supply)}
    # Check units and bounds. Without this check, -5 busy CPUs of a rank caused a ZeroDivisionError. A step in ms gave a
    # plan that looked normal.
    for path, record in {"": profile, "training.": training, **supply}.items():
        for name, (unit, maximum) in _FIGURES.items():
            figure = getattr(record, name, None)
            if figure is not None and not (figure.unit == unit and 0 <= figure.value <= maximum):
                found = f"{path}{name} is {figure.value:g} {figure.unit:.60}"
                raise ConfigError(f"the profile's {found}; expected 0 to {maximum:g} {unit}{_TO_DO}")
    times_s = {f"{path}sample_cpu_s": each.sample_cpu_s for path, each in supply.items()}
    for path, spread in {"training.step_s": training.step_s, **times_s}.items():
        if spread.mean < _LEAST_TIME_S:
            raise ConfigError(
                f"the profile's {path}.mean is {spread.mean:g} s; expected {_LEAST_TIME_S:g} s or more{_TO_DO}"
            )
    for path, each in supply.items():
        # The numbers of processes must ascend, because other orders caused a ZeroDivisionError in the model.
        numbers = [point.num_processes for point in each.concurrency]
        if numbers != sorted(set(numbers)):
            found = f"{path}concurrency has {', '.join(map(str, numbers))} processes"
            raise ConfigError(f"the profile's {found}; expected more in each entry{_TO_DO}")


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Args:
        path: ``profile.json``, or the directory that contains it.

    Raises:
        ConfigError: If the profile is missing or malformed. The message names the file and the key path.
    """
    to_do = "make one with hetero profile SCRIPT"
    return load(Profile, path, PROFILE_FILE_NAME, to_do=to_do)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file. Other programs never see a part of the file.

    Raises:
        OSError: If the file cannot be written.
    """
    write_text(path, json_text(profile))
