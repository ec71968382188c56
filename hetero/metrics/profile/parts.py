"""The measurements of one rank or one host for a profile, which it sends as JSON to the launcher that writes it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetero.documents.records import JsonRecord, encode, limits
from hetero.metrics.figures import Figure
from hetero.metrics.profile.profile import CodecProfile, LeafProfile, Spread, SupplyProfile, evenly_spaced

__all__ = [
    "MAX_ARGUMENTS_CHARS",
    "MAX_INDICES",
    "MIN_STEPS",
    "PHASES",
    "Contents",
    "HostPart",
    "RankPart",
    "SampledWork",
]

MIN_STEPS = 10
"""Fewest measured steps of a figure. If steps vary by 30 %, the mean of ten has an error of
10 %."""
PHASES = ("warm-up", "as it runs", "headspace", "done")
"""The phases of a profile run in a rank, in order. See `hetero.loaders.measuring.phases`."""
MAX_VALUES = 256
"""Limit of the values of one distribution that a rank sends, because a heartbeat carries those of all ranks."""
MAX_INDICES = 2048
"""Limit of the samples that a rank names for the measurement of the supply."""
MAX_ARGUMENTS_CHARS = 8192
"""Limit of the arguments of a data set whose supply is measured. A heartbeat carries them."""

_Thinned = TypeVar("_Thinned", "RankPart", SupplyProfile)


class _Sent(JsonRecord):
    """A record that is sent as JSON with six digits of each number, because a heartbeat has a limited size."""

    __slots__ = ()

    def to_json(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps(_rounded(encode(self)), allow_nan=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledWork:
    """Samples of the job. Hosts fetch them to measure what a sample costs."""

    dataset: str
    """Registered name of the data set."""
    arguments_json: str = field(metadata=limits(max_length=MAX_ARGUMENTS_CHARS))
    """Arguments of the data set, see `hetero.spec.DatasetSpec`."""
    indices: tuple[int, ...] = field(metadata=limits(minimum=-(2.0**63), min_items=1, max_items=MAX_INDICES))
    """Indices of samples in the order of the job. The samples that the job would have fetched next come first, if there
    are any, because the operating system has not cached their files yet."""
    batch_samples: int = field(metadata=limits(minimum=1))
    """Samples of one batch."""
    seed: int = field(metadata=limits(minimum=-(2.0**63)))
    epoch: int
    collate: bool = True
    """Whether samples are collated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a batch consists of."""

    leaves: tuple[LeafProfile, ...] = field(default=(), metadata=limits(max_items=100))
    wire_bytes_per_sample: Figure | None = None
    """Bytes of a sample on the network, with its share of the header. None if the batch cannot be sent."""
    codecs: tuple[CodecProfile, ...] = ()
    """One entry for each codec that is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart(_Sent):
    """What one rank has measured. Until it is done, only the progress is set."""

    loader: str
    """Name of the loader with the most time. Empty if no loader was used."""
    phase: str = field(metadata=limits(choices=PHASES))
    num_steps: int
    """Steps of this phase so far."""
    num_planned: int
    """Steps that the phase needs before it may end."""
    num_steps_total: int
    """Steps of the loader so far, in all phases."""
    batch_samples: int
    num_loader_processes: int
    """Processes of this rank that fetch batches. 0 if the rank itself or endpoints fetch them."""
    steps_per_epoch: int | None = None
    requests_ahead: bool = False
    """See `hetero.metrics.profile.profile.TrainingProfile`."""
    step_s: Spread | None = None
    """Step time as the job runs."""
    data_wait_s: Spread | None = None
    """Data wait of each step in seconds, as the job runs."""
    headspace_s: Spread | None = None
    cpu_cores: float | None = None
    """CPUs that the rank kept busy in the headspace phase."""
    gpu_percent: float | None = None
    """NVML's utilisation of the machine's GPUs in the headspace phase."""
    work: SampledWork | None = None
    """Samples for the measurement of the supply. Only rank 0 sends them."""
    supply: SupplyProfile | None = None
    """What rank 0 measured itself, because hosts cannot build the data set."""
    contents: Contents | None = None
    """The batches of rank 0, if it measured them itself."""
    note: str = ""
    """Why hosts cannot measure the supply. Empty if they can."""
    is_registered: bool = True
    """Whether ``@hetero.dataset`` registers the factory of the data set, so data hosts can build it."""

    def to_json(self) -> bytes:
        """Return the record as JSON, with six digits of each value, and with fewer values of each distribution."""
        return _Sent.to_json(_thinned(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart(_Sent):
    """What one host measured after the training."""

    supply: SupplyProfile | None = None
    """None if the data set could not be measured on this host."""
    contents: Contents | None = None
    receive_cpu_s_per_gb: Figure | None = None
    notes: tuple[str, ...] = ()
    """One sentence for each figure that could not be measured, with the reason."""


def _thinned(record: _Thinned) -> _Thinned:
    """Return the record with at most `MAX_VALUES` values of each distribution."""
    changes: dict[str, Any] = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Spread):
            changes[each.name] = dataclasses.replace(value, values=evenly_spaced(value.values, MAX_VALUES))
        elif isinstance(value, SupplyProfile):
            changes[each.name] = _thinned(value)
    return dataclasses.replace(record, **changes)


def _rounded(value: object) -> object:
    """Return JSON values with six digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
