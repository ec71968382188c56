"""Profiles of jobs, made from stated figures."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hetero.metrics.figures import Figure
from hetero.metrics.profile.profile import LeafProfile, Profile, Spread, SupplyProfile, TrainingProfile


def spread(mean: float, unit: str = "s", variation: float = 0.05) -> Spread:
    """Return 100 values around a mean, equal in every run."""
    source = random.Random(f"{mean} {unit}")
    values = [max(0.0, source.gauss(mean, variation * mean)) for _ in range(100)]
    scale = mean / (sum(values) / 100) if mean else 1.0
    return Spread.of([value * scale for value in values], unit, "measured")


def measured(value: float, unit: str) -> Figure:
    return Figure(value=value, unit=unit, basis="measured")


def make_profile(
    *,
    headspace_s: float,
    cpu_s: float,
    step_s: float | None = None,
    wait_s: float = 0.0,
    batch: int = 64,
    vcpus: int = 8,
    processes: int = 8,
    ranks: int = 1,
    hosts: int = 1,
    sample_bytes: float = 150_528.0,
    rank_cores: float = 0.0,
    private_bytes: float = 0.0,
    trainer: str = "ml.p3.2xlarge",
    dtype: str = "uint8",
    **changes: Any,
) -> Profile:
    supply_s = ranks * batch * (cpu_s + wait_s) / max(1, processes)
    step_s = step_s or max(headspace_s, supply_s)
    training = TrainingProfile(
        instance_type=trainer,
        vcpus=vcpus,
        num_hosts=hosts,
        ranks_per_host=ranks,
        batch_samples=batch,
        num_local_processes=processes,
        headspace_s=spread(headspace_s),
        step_s=spread(step_s),
        data_wait_s=spread(max(0.0, step_s - headspace_s)),
        rank_cpu_cores=measured(rank_cores, "CPU"),
        receive_cpu_s_per_gb=measured(0.3, "s/GB"),
    )
    supply = SupplyProfile(
        instance_type=trainer,
        vcpus=vcpus,
        sample_cpu_s=spread(cpu_s),
        sample_wait_s=spread(wait_s),
        batch_cpu_s=spread(0.0),
        endpoint_private_bytes=measured(private_bytes, "B") if private_bytes else None,
    )
    profile = Profile(
        schema_version=1,
        command="train.py",
        measured_at="2026-11-23T10:00:00+00:00",
        origin="profile",
        training=training,
        supply=(supply,),
        leaves=(LeafProfile(path="[0]", dtype=dtype, bytes_per_sample=sample_bytes, fits_uint8=dtype != "uint8"),),
        wire_bytes_per_sample=measured(sample_bytes, "B"),
    )
    return replace(profile, **changes)
