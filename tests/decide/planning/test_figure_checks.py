"""Profiles with figures that no measurement yields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero.decide.planning.plan import make_plan
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import CodecProfile, ConcurrencyPoint, LeafProfile, Profile, check_figures
from hetero.pricing.catalog import Catalogue
from tests.support.planning import make_profile, measured, spread

JOB = make_profile(headspace_s=0.18, cpu_s=0.15)


def with_training(**changes: Any) -> Profile:
    return replace(JOB, training=replace(JOB.training, **changes))


def with_supply(**changes: Any) -> Profile:
    return replace(JOB, supply=(replace(JOB.supply[0], **changes),))


def test_profile_of_a_real_job_is_accepted() -> None:
    check_figures(JOB)
    check_figures(with_supply(endpoint_private_bytes=measured(2e8, "B"), build_s=measured(300.0, "s")))
    check_figures(with_training(gpu_percent=measured(97.0, "%"), step_s=replace(spread(1.0), mean=1.01)))


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            with_training(rank_cpu_cores=measured(-5, "CPU")),
            r"training\.rank_cpu_cores is -5 CPU; expected 0 to",
        ),
        (with_training(receive_cpu_s_per_gb=measured(-1, "s/GB")), r"receive_cpu_s_per_gb is -1 s/GB; expected"),
        (with_training(gpu_percent=measured(-1, "%")), r"gpu_percent is -1 %; expected 0 to 100 %"),
        (with_training(gpu_percent=measured(250, "%")), r"gpu_percent is 250 %; expected 0 to 100 %"),
        (with_supply(endpoint_private_bytes=measured(-1, "B")), r"supply\[0\]\.endpoint_private_bytes is -1 B"),
        (with_supply(build_s=measured(float("nan"), "s")), r"supply\[0\]\.build_s\.value: found nan"),
        (replace(JOB, wire_bytes_per_sample=measured(-1, "B")), r"profile's wire_bytes_per_sample is -1 B"),
        (
            replace(JOB, wire_bytes_per_sample=measured(1e17, "B")),
            r"wire_bytes_per_sample is 1e\+17 B; expected",
        ),
    ],
)
def test_figure_that_is_negative_or_too_large_is_rejected(profile: Profile, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_figures(profile)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (with_training(step_s=spread(500.0, "ms")), r"training\.step_s\.unit: found 'ms', expected one of s"),
        (with_supply(sample_wait_s=spread(5.0, "ms")), r"supply\[0\]\.sample_wait_s\.unit: found 'ms'"),
        (
            replace(JOB, wire_bytes_per_sample=measured(1, "GB")),
            r"wire_bytes_per_sample is 1 GB; expected 0 to .* B",
        ),
    ],
)
def test_figure_in_another_unit_is_rejected(profile: Profile, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_figures(profile)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (with_training(step_s=spread(1e15)), r"training\.step_s\.mean: found 1.*, expected a number from 0 to 86400"),
        (with_training(step_s=spread(1e-30)), r"training\.step_s\.mean is 1e-30 s; expected 1e-09 s or more"),
        (
            with_training(batch_samples=10**12),
            r"training\.batch_samples: found 1000000000000, expected a number from 1",
        ),
        (with_supply(sample_cpu_s=spread(1e12)), r"supply\[0\]\.sample_cpu_s\.mean: found"),
        (
            with_supply(
                concurrency=(ConcurrencyPoint(num_processes=1, samples_per_s=1e-20, cpu_s_per_sample=0.1),),
            ),
            r"supply\[0\]\.concurrency\[0\]\.samples_per_s: found 1e-20",
        ),
        (
            replace(JOB, leaves=(LeafProfile(path="[0]", dtype="uint8", bytes_per_sample=1e15),)),
            r"leaves\[0\]\.bytes_per_sample: found 1000000000000000",
        ),
        (
            replace(
                JOB,
                codecs=(CodecProfile(name="lz4", ratio=0.5, encode_cpu_s_per_sample=1e9, decode_cpu_s_per_sample=0.1),),
            ),
            r"codecs\[0\]\.encode_cpu_s_per_sample: found 1000000000",
        ),
    ],
)
def test_size_that_no_job_has_is_rejected(profile: Profile, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_figures(profile)


def test_plan_of_an_impossible_profile_is_rejected(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError, match=r"rank_cpu_cores is -5 CPU.*\n  to do: run hetero profile again"):
        make_plan(with_training(rank_cpu_cores=measured(-5, "CPU")), catalogue)
