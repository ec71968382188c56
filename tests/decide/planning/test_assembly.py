"""Profiles made from the measurements of ranks and hosts, and the page that shows them."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

import jsonschema
import pytest

from hetero.documents.records import decode, encode
from hetero.errors import ConfigError
from hetero.metrics.profile.assembly import JobFacts, assemble_profile
from hetero.metrics.profile.parts import Contents, HostPart, RankPart, SampledWork
from hetero.metrics.profile.profile import ConcurrencyPoint, LeafProfile, Profile, Spread, SupplyProfile
from hetero.metrics.profile.text import first_sentence, render_profile
from tests.support.planning import make_profile, measured, spread

FACTS = JobFacts(
    command="train.py --epochs 2",
    measured_at="2026-11-23T10:00:00+00:00",
    instance_type="ml.p3.2xlarge",
    vcpus=8,
    num_hosts=1,
    ranks_per_host=2,
    num_endpoints=0,
    warmup_steps=10,
)


def rank_part(**changes: Any) -> RankPart:
    values: dict[str, Any] = {
        "loader": "photos",
        "phase": "done",
        "num_steps": 0,
        "num_planned": 0,
        "num_steps_total": 110,
        "batch_samples": 64,
        "num_loader_processes": 4,
        "steps_per_epoch": 500,
        "step_s": spread(0.3),
        "data_wait_s": spread(0.2),
        "headspace_s": spread(0.1),
        "cpu_cores": 1.5,
    }
    return RankPart(**values | changes)


def supply(instance_type: str = "ml.p3.2xlarge", cpu_s: float = 0.02) -> SupplyProfile:
    points = [ConcurrencyPoint(num_processes=n, samples_per_s=n * 45.0, cpu_s_per_sample=cpu_s) for n in (1, 2, 4, 8)]
    return SupplyProfile(
        instance_type=instance_type,
        vcpus=8,
        sample_cpu_s=spread(cpu_s),
        sample_wait_s=spread(0.001),
        batch_cpu_s=spread(0.0001),
        concurrency=tuple(points),
        endpoint_private_bytes=measured(2e8, "B"),
    )


def host_part(**changes: Any) -> HostPart:
    contents = Contents(
        leaves=(LeafProfile(path="[0]", dtype="float32", bytes_per_sample=602_112, fits_uint8=True),),
        wire_bytes_per_sample=measured(602_120, "B"),
    )
    values: dict[str, Any] = {"supply": supply(), "contents": contents, "receive_cpu_s_per_gb": measured(0.4, "s/GB")}
    return HostPart(**values | changes)


def test_profile_has_the_times_of_the_slowest_rank() -> None:
    slow = rank_part(step_s=spread(0.35), data_wait_s=spread(0.1), headspace_s=spread(0.25), cpu_cores=2.0)
    profile = assemble_profile({0: rank_part(), 1: slow}, [host_part()], FACTS)
    training = profile.training
    assert training.headspace_s.mean == pytest.approx(0.25)
    assert training.step_s.mean == pytest.approx(0.35)
    assert training.data_wait_s.mean == pytest.approx(0.2)
    assert training.rank_cpu_cores == measured(2.0, "CPU")
    assert (training.num_local_processes, training.batch_samples, training.steps_per_epoch) == (8, 64, 500)
    assert {training.headspace_s.basis, training.step_s.basis, training.data_wait_s.basis} == {"measured"}
    assert profile.supply == (supply(),)
    assert profile.has_registered_dataset


@pytest.mark.parametrize(
    ("changes", "headspace", "step"),
    [
        ({"is_step_emulated": True}, "simulated", "simulated"),
        ({"is_sample_emulated": True}, "measured", "simulated"),
    ],
)
def test_profile_labels_what_was_emulated(changes: dict[str, Any], headspace: str, step: str) -> None:
    facts = dataclasses.replace(FACTS, **changes)
    training = assemble_profile({0: rank_part()}, [host_part()], facts).training
    assert (training.headspace_s.basis, training.step_s.basis) == (headspace, step)


def test_profile_of_two_types_has_the_trainer_hosts_first() -> None:
    data_host = HostPart(supply=supply("ml.c5.9xlarge", 0.0125))
    profile = assemble_profile({0: rank_part()}, [host_part(), data_host], FACTS)
    assert [each.instance_type for each in profile.supply] == ["ml.p3.2xlarge", "ml.c5.9xlarge"]


def test_profile_of_a_script_that_ended_early_computes_the_headspace() -> None:
    values = [0.3, 0.4, 0.5, 0.4, 0.4] * 2
    part = rank_part(
        headspace_s=None,
        step_s=Spread.of(values, "s", "measured"),
        data_wait_s=Spread.of([0.1] * 10, "s", "measured"),
    )
    profile = assemble_profile({0: part}, [host_part()], FACTS)
    headspace = profile.training.headspace_s
    assert (headspace.basis, headspace.num_measured) == ("modelled", 10)
    assert headspace.mean == pytest.approx(0.3)
    assert "ended before batches were repeated" in profile.notes[0]


def test_profile_of_too_few_steps_is_rejected_with_what_to_do() -> None:
    part = rank_part(step_s=Spread.of([0.3] * 9, "s", "measured"), num_steps_total=19, headspace_s=None)
    with pytest.raises(ConfigError) as caught:
        assemble_profile({0: part}, [host_part()], FACTS)
    assert "the script ended after 19 complete steps of loader photos on rank 0, 9 of them after" in str(caught.value)
    assert "smaller --warmup-steps than 10" in str(caught.value)


def test_profile_of_a_script_that_reports_no_step_says_how_to_report_them() -> None:
    part = rank_part(step_s=None, data_wait_s=None, headspace_s=None, num_steps_total=0)
    with pytest.raises(ConfigError, match=r"(?s)no complete step of loader photos.*callbacks=\[data\.callback\(\)\]"):
        assemble_profile({0: part}, [host_part()], FACTS)


def test_wait_of_steps_that_take_several_batches_is_modelled_or_missing() -> None:
    part = rank_part(data_wait_s=Spread.of([0.2] * 5, "s", "modelled"))
    profile = assemble_profile({0: part}, [host_part()], FACTS)
    assert (profile.training.data_wait_s.basis, profile.training.step_s.basis) == ("modelled", "measured")
    assert "Steps take several batches at once" in profile.notes[0]
    with pytest.raises(ConfigError, match="(?s)ended before batches were repeated.*without steps_per_execution"):
        assemble_profile({0: rank_part(data_wait_s=None, headspace_s=None)}, [host_part()], FACTS)


def test_profile_without_a_loader_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no rank took a batch from a loader of hetero"):
        assemble_profile({}, [host_part()], FACTS)


def test_profile_without_a_supply_is_rejected_with_the_reason() -> None:
    failed = HostPart(notes=("Samples were not measured on algo-1: there is no folder.",))
    with pytest.raises(ConfigError, match="(?s)could not be measured.*there is no folder"):
        assemble_profile({0: rank_part()}, [failed], FACTS)


def test_profile_of_an_object_has_the_supply_that_the_rank_measured() -> None:
    own = dataclasses.replace(supply(""), vcpus=2, concurrency=())
    part = rank_part(supply=own, contents=host_part().contents, note="the data set is an object", is_registered=False)
    profile = assemble_profile({0: part, 1: rank_part()}, [HostPart(receive_cpu_s_per_gb=measured(0.4, "s/GB"))], FACTS)
    assert not profile.has_registered_dataset
    assert (profile.supply[0].instance_type, profile.supply[0].vcpus) == ("ml.p3.2xlarge", 8)
    assert profile.wire_bytes_per_sample == measured(602_120, "B")
    assert "one process of a rank, because the data set is an object" in profile.notes[0]


def test_registered_data_set_that_hosts_could_not_measure_is_still_registered() -> None:
    part = rank_part(supply=supply(), note="its samples have indices that are not integers")
    assert assemble_profile({0: part}, [HostPart()], FACTS).has_registered_dataset


def test_part_of_a_rank_written_and_read_is_the_same_up_to_six_digits() -> None:
    work = SampledWork(dataset="photos", arguments_json="{}", indices=(5, 3), batch_samples=2, seed=-1, epoch=0)
    part = rank_part(step_s=Spread.of([0.123456789], "s", "measured"), work=work)
    again = RankPart.from_json(part.to_json())
    assert again.step_s is not None
    assert again.step_s.values == (0.123457,)
    assert again.work == work


def test_part_of_a_rank_with_all_figures_fits_into_a_report() -> None:
    full = Spread.of([0.1234567 * (1 + i / 7919) for i in range(5000)], "s", "measured")
    work = SampledWork(
        dataset="photos",
        arguments_json="x" * 8000,
        indices=tuple(range(10**9, 10**9 + 2048)),
        batch_samples=64,
        seed=0,
        epoch=0,
    )
    own = dataclasses.replace(supply(""), sample_cpu_s=full, sample_wait_s=full, batch_cpu_s=full)
    part = rank_part(step_s=full, data_wait_s=full, headspace_s=full, work=work, supply=own)
    assert len(part.to_json()) < 64 * 1024
    sent = RankPart.from_json(part.to_json())
    assert sent.step_s is not None
    assert (len(sent.step_s.values), sent.step_s.num_measured) == (256, 5000)
    assert sent.step_s.mean == pytest.approx(full.mean, rel=1e-5)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"phase": "lunch", "loader": ""}'])
def test_part_that_is_malformed_is_rejected(content: bytes) -> None:
    with pytest.raises(ConfigError, match="the JSON of RankPart is malformed"):
        RankPart.from_json(content)


def test_profile_json_satisfies_the_schema_and_survives() -> None:
    text = resources.files("hetero.metrics.profile").joinpath("data/profile.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    profile = assemble_profile({0: rank_part()}, [host_part()], FACTS)
    jsonschema.validate(encode(profile), schema)
    assert decode(Profile, encode(profile)) == profile


def test_first_sentence_says_what_the_accelerators_could_take_and_what_the_cpus_make() -> None:
    profile = assemble_profile({0: rank_part()}, [host_part()], FACTS)
    assert first_sentence(profile) == (
        "The accelerators could take 1,280 samples/s; this host's 8 vCPUs make 360; 67 % of each step is waiting for "
        "data."
    )


@pytest.mark.parametrize(
    ("share", "begin"),
    [
        (0.02, "The accelerators could take 1,280 samples/s"),
        (0.2, "Up to 20 % of the measured times may be due to other work of the machine. The accelerators could take"),
        (0.79, "Up to 79 % of the measured times may be due to other work of the machine, so the profile gives no"),
    ],
)
def test_first_sentence_says_how_much_of_the_times_may_be_due_to_others(share: float, begin: str) -> None:
    facts = dataclasses.replace(FACTS, excess_share=share, excess_notes=("9 of 10 steps were late.",))
    profile = assemble_profile({0: rank_part()}, [host_part()], facts)
    assert first_sentence(profile).startswith(begin)
    assert ("8 vCPUs make at least 360" in first_sentence(profile)) == (share == 0.2)
    assert profile.training.excess_share == share
    assert "9 of 10 steps" in render_profile(profile)


def test_first_sentence_of_a_job_with_data_hosts_says_whose_wait_it_is() -> None:
    profile = assemble_profile({0: rank_part()}, [host_part()], FACTS)
    training = dataclasses.replace(profile.training, has_data_hosts=True)
    assert "; with the job's data hosts, " in first_sentence(dataclasses.replace(profile, training=training))


def test_first_sentence_of_a_run_that_never_waited_says_so() -> None:
    profile = make_profile(headspace_s=0.2, cpu_s=0.001, step_s=0.2)
    assert first_sentence(profile).endswith("make 8,000; no step waits for data.")


def test_profile_of_a_disturbed_host_says_so() -> None:
    part = rank_part(step_s=spread(0.3), data_wait_s=spread(0.0), headspace_s=spread(0.5))
    assert "profile again on an idle host" in assemble_profile({0: part}, [host_part()], FACTS).notes[0]


def test_page_labels_every_figure() -> None:
    page = render_profile(assemble_profile({0: rank_part()}, [host_part(notes=("No codec.",))], FACTS))
    rows = [line for line in page.splitlines() if line.startswith("|") and "---" not in line]
    figures = [row for row in rows if " ms " in row or " MB " in row or " s " in row]
    assert len(figures) >= 8
    assert [row for row in figures if not any(word in row for word in ("measured", "simulated", "modelled"))] == []
    assert "| `[0]` | float32 |     602 kB | yes" in page
    assert "- No codec." in page
