"""Rejects a profile with figures that no measurement yields, because a plan would divide by them or believe them.

`hetero.documents.records` has checked the types already. The limits here are far above what a real job needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from hetero.errors import ConfigError
from hetero.metrics.figures import Figure
from hetero.planning.profile import ConcurrencyPoint, Profile, Spread, SupplyProfile, TrainingProfile

__all__ = ["check_figures"]

_TO_DO = "\n  to do: run hetero profile again"
_MAX_S = 86_400.0
"""A day, for a step, a sample, or the build of a data set."""
_MAX_SAMPLE_BYTES = 1e12
_LIMITS = {
    "rank_cpu_cores": ("CPU", 4096.0),
    "receive_cpu_s_per_gb": ("s/GB", 10_000.0),
    "gpu_percent": ("%", 100.0),
    "endpoint_private_bytes": ("B", 1e14),
    "endpoint_shared_bytes": ("B", 1e14),
    "build_s": ("s", _MAX_S),
    "storage_bytes_per_sample": ("B", _MAX_SAMPLE_BYTES),
    "wire_bytes_per_sample": ("B", _MAX_SAMPLE_BYTES),
}
"""Unit and largest value of each `Figure` of a profile."""
_MAX_BATCH_SAMPLES = 10**9
_MIN_RATE, _MAX_RATE = 1 / _MAX_S, 1e9
"""Samples per second of a host."""
_LEAST_S = 1e-9
"""Least mean time of a step or a sample."""
_MEAN_TOLERANCE = 0.01
"""How far a mean may be outside its values, as a share. A profile from a report takes both from different sums."""


def check_figures(profile: Profile) -> None:
    """Check units and sizes of all figures of a profile.

    Raises:
        ConfigError: If a unit differs, a figure is negative or too large, a mean is outside the range of its values, a
            step or a sample takes no time, or the numbers of processes of a measurement do not ascend. The message
            names the key path.
    """
    training = profile.training
    _check_record(profile, "")
    _check_record(training, "training.")
    _check_number("training.batch_samples", training.batch_samples, 1, _MAX_BATCH_SAMPLES, "samples")
    _check_above_0("training.step_s.mean", training.step_s.mean)
    _check_number("training.step_s.mean", training.step_s.mean, _LEAST_S, _MAX_S, "s")
    for index, supply in enumerate(profile.supply):
        path = f"supply[{index}]."
        _check_record(supply, path)
        _check_above_0(f"{path}sample_cpu_s.mean", supply.sample_cpu_s.mean)
        _check_number(f"{path}sample_cpu_s.mean", supply.sample_cpu_s.mean, _LEAST_S, _MAX_S, "s")
        _check_concurrency(supply.concurrency, f"{path}concurrency")
    for index, leaf in enumerate(profile.leaves):
        _check_number(f"leaves[{index}].bytes_per_sample", leaf.bytes_per_sample, 0, _MAX_SAMPLE_BYTES, "B")
    for index, codec in enumerate(profile.codecs):
        path = f"codecs[{index}]."
        _check_number(f"{path}encode_cpu_s_per_sample", codec.encode_cpu_s_per_sample, 0, _MAX_S, "s")
        _check_number(f"{path}decode_cpu_s_per_sample", codec.decode_cpu_s_per_sample, 0, _MAX_S, "s")


def _check_record(record: Profile | TrainingProfile | SupplyProfile, path: str) -> None:
    """Check the fields of one record that are figures or distributions. All distributions are in seconds."""
    for name, value in _fields(record):
        if isinstance(value, Figure):
            unit, maximum = _LIMITS[name]
            _check_unit(f"{path}{name}", value.unit, unit)
            _check_number(f"{path}{name}.value", value.value, 0, maximum, unit)
        elif isinstance(value, Spread):
            _check_unit(f"{path}{name}", value.unit, "s")
            low, high = min(value.values), max(value.values)
            _check_number(f"{path}{name}.values", low, 0, _MAX_S, "s")
            _check_number(f"{path}{name}.values", high, 0, _MAX_S, "s")
            if not low * (1 - _MEAN_TOLERANCE) <= value.mean <= high * (1 + _MEAN_TOLERANCE):
                raise ConfigError(
                    f"the profile's {path}{name}.mean is {value.mean:g} s, but its values are from {low:g} to {high:g} "
                    f"s; expected a mean in this range{_TO_DO}"
                )


def _fields(record: Profile | TrainingProfile | SupplyProfile) -> Iterator[tuple[str, object]]:
    return ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))


def _check_concurrency(points: tuple[ConcurrencyPoint, ...], path: str) -> None:
    numbers = [point.num_processes for point in points]
    if any(after <= before for before, after in itertools.pairwise(numbers)):
        raise ConfigError(
            f"the profile's {path} has {', '.join(map(str, numbers))} processes; expected more in each entry{_TO_DO}"
        )
    for row, point in enumerate(points):
        for name, low, high, unit in (
            ("samples_per_s", _MIN_RATE, _MAX_RATE, "samples/s"),
            ("cpu_s_per_sample", _LEAST_S, _MAX_S, "s"),
        ):
            value = getattr(point, name)
            _check_above_0(f"{path}[{row}].{name}", value)
            _check_number(f"{path}[{row}].{name}", value, low, high, unit)


def _check_unit(name: str, unit: str, expected: str) -> None:
    if unit != expected:
        raise ConfigError(f"the profile's {name}.unit is {unit!r:.60}; expected {expected!r}{_TO_DO}")


def _check_above_0(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"the profile's {name} is {value:g}; expected a number above 0{_TO_DO}")


def _check_number(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # this also rejects a value that is no number
        raise ConfigError(f"the profile's {name} is {value:g} {unit}; expected {low:g} to {high:g} {unit}{_TO_DO}")
