"""Is a heterogeneous cluster worth its price, and does simulation predict the published answer?

Question: given only the published homogeneous step time, what step time and cost does a simulated
heterogeneous job of the published cluster show, and how far is that from the published result?

Method: the real launcher, ranks, endpoints and data plane run as `hetero simulate` runs them. vCPUs and
accelerators are emulated. One sample costs ``baseline step time x trainer vCPUs / global batch`` seconds
of one vCPU, so the homogeneous row reproduces its calibration. The heterogeneous rows are predictions, and
nothing is fitted to them. Warm-up is left out. Every configuration runs ``--runs`` times, interleaved, and
the table shows medians.

``--backend grpc``: batches come from endpoints, whose vCPUs are slots. ``--backend tf``: the pipeline of
`examples/resnet_tf`, run by tf.data service or, without data hosts, by tf.data in every rank. There a vCPU is a
branch of the pipeline that waits for the emulated time of a sample. Decoding and augmenting a tiny photograph add real
work. Ranks meet by a collective of `tf.distribute.MultiWorkerMirroredStrategy`. This needs TensorFlow, and 19 processes
of it for seed-tf.

    python benchmarks/price_performance.py --profile seed-pt
    python benchmarks/price_performance.py --profile seed-tf
    python benchmarks/price_performance.py --profile seed-tf --backend tf
    python benchmarks/price_performance.py --profile FILE

Results, with hardware and versions, go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_pipelines
import yaml
from harness import HERE, RESULTS, call, environment, save, say

from hetero.cluster.groups import StatedGroup
from hetero.documents.quantities import NOT_KNOWN
from hetero.errors import ConfigError
from hetero.pricing import Catalogue, cost
from hetero.report import load_report
from hetero.report.markdown import PricePerformance, price_performance_table
from hetero.simulate.simulate import parse_group

WARMUP_CYCLES = 2
PHOTOS = HERE.parent / "data" / "bench-photos-tiny"
"""Tiny photographs. Decoding one takes a thousandth of the emulated time of a sample."""

BASELINE = "homogeneous"
"""Name of the published cluster that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One cluster to run."""

    name: str
    groups: tuple[str, ...]
    """As `hetero simulate --group` takes them."""
    trainer_endpoints: int = 0
    """Endpoints that preprocess on the trainer host's own vCPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the article printed."""

    heterogeneous_step_time_s: float
    hourly_usd: dict[str, float]
    printed_cost: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A comparison: a baseline with its measured step time, and what to try instead."""

    title: str
    num_ranks: int
    batch_size: int
    """Samples per rank and step. It sets how finely the emulated work is divided, not its amount."""
    cycles: int
    """Whole turns of all vCPUs to measure. Emulated vCPUs finish their batches together, so
    steps come in bursts of ``vCPUs / ranks``. Only whole bursts give an unbiased mean."""
    baseline_step_time_s: float
    accelerator_step_time_s: float
    baseline: Configuration
    candidates: tuple[Configuration, ...]
    price_profile: str | None = None
    published: Published | None = None
    explanation: str = ""

    @property
    def sample_time_s(self) -> float:
        """Seconds that one sample costs one vCPU, from the baseline alone."""
        vcpus = num_vcpus(self, self.baseline)
        return self.baseline_step_time_s * vcpus / (self.num_ranks * self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a backend adds to a job."""

    flags: tuple[str, ...]
    """Of `hetero simulate`."""
    script: str
    """In this folder."""
    script_args: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Who preprocesses, and emulates the vCPUs for it."""

    title: str
    """Behind the profile's, where it is not empty."""
    ending: str
    """Of the result's name."""
    counts_overruns: bool
    """Whether the real work of a sample is part of the emulated time, and may exceed it."""
    job: Callable[[Profile, Configuration], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The medians over the runs of one configuration."""

    configuration: Configuration
    step_times_s: tuple[float, ...]
    hourly_usd: float | None
    num_overruns: int | None
    """Emulated batches whose real work took longer than the emulated time. Their emulation is wrong. None if the real
    work is not part of the emulated time."""

    @property
    def step_time_s(self) -> float:
        """Median over the runs of the mean step time."""
        return statistics.median(self.step_times_s)

    @property
    def cost_usd(self) -> float | None:
        """USD per 1,000 steps."""
        return None if self.hourly_usd is None else cost.cost_per_1k_steps_usd(self.hourly_usd, self.step_time_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a profile and print its table."""
    args = parse_arguments(argv)
    profile, backend = load_profile(args.profile), BACKENDS[args.backend]
    configurations = (profile.baseline, *profile.candidates)
    jobs = [backend.job(profile, configuration) for configuration in configurations]  # refuses before anything runs
    say(f"{profile.title}{backend.title}\n{describe_calibration(profile)}")
    if args.backend == "tf":
        bench_pipelines.make_photos(PHOTOS, count=200, size="64x48")
    facts = environment()
    found: dict[str, list[Any]] = {configuration.name: [] for configuration in configurations}
    for run_index in range(args.runs):
        for configuration, job in zip(configurations, jobs, strict=True):
            say(f"run {run_index + 1}/{args.runs}: {configuration.name}")
            found[configuration.name].append(simulate(profile, configuration, job))
    outcomes = [summarise(configuration, found[configuration.name], backend) for configuration in configurations]
    text = render(profile, outcomes, backend)
    print(text)
    path = args.results / f"price_performance-{Path(args.profile).stem}{backend.ending}"
    write_result(path, profile, outcomes, text, {"backend": args.backend, **facts})
    return 0


def load_profile(name: str) -> Profile:
    """Read a shipped profile or a file.

    Raises:
        ConfigError: If the profile is missing or malformed.
    """
    path = HERE / "profiles" / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in (HERE / "profiles").glob("*.yaml")))
        raise ConfigError(f"profile {name!r}: neither a file nor one of {known}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        baseline, candidates, published = (
            content.pop("baseline"),
            content.pop("candidates"),
            content.pop("published", None),
        )
        return Profile(
            **content,
            baseline=read_configuration(baseline),
            candidates=tuple(read_configuration(candidate) for candidate in candidates),
            published=None if published is None else Published(**published),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"profile {path}: {error}; see benchmarks/profiles/seed-pt.yaml for the keys") from error


def read_configuration(content: dict[str, Any]) -> Configuration:
    """Return a configuration from its keys in a profile."""
    return Configuration(**{**content, "groups": tuple(content["groups"])})


def preprocessing(profile: Profile, configuration: Configuration) -> list[tuple[int, StatedGroup]]:
    """Return the groups that preprocess in a configuration, each after the vCPUs of one of its hosts."""
    catalogue = Catalogue.load(profile=profile.price_profile)
    groups = [parse_group(text) for text in configuration.groups]
    if len(groups) > 1 and not configuration.trainer_endpoints:
        groups = [group for group in groups if is_data(group)]
    counts = [(catalogue.get(group.instance_type).vcpus, group) for group in groups]
    unknown = [group.instance_type for vcpus, group in counts if vcpus is None]
    if unknown:
        raise ConfigError(f"the vCPU count of {', '.join(unknown)} is not known")
    return [(vcpus or 0, group) for vcpus, group in counts]


def is_data(group: StatedGroup) -> bool:
    """Return whether a group only preprocesses."""
    return group.name.startswith("data")


def num_vcpus(profile: Profile, configuration: Configuration) -> int:
    """Return the vCPUs that preprocess in a configuration."""
    return sum(vcpus * group.count for vcpus, group in preprocessing(profile, configuration))


def endpoint_job(profile: Profile, configuration: Configuration) -> Job:
    """Return the job whose endpoints have a slot for every vCPU."""
    return Job(
        flags=(
            *("--trainer-endpoints", str(configuration.trainer_endpoints)),
            *("--emulate-sample-seconds", repr(profile.sample_time_s), "--purity-checks", "0"),
        ),
        script="scripts/train_emulated.py",
        script_args=(),
    )


def tf_job(profile: Profile, configuration: Configuration) -> Job:
    """Return the job whose tf.data pipelines have a branch for every vCPU.

    All workers of tf.data service run the same pipeline, so hosts of different sizes have different numbers of workers.
    A worker emulates the greatest common divisor of the hosts' vCPUs.

    Raises:
        ConfigError: If the vCPUs cannot be divided in this way.
    """
    hosts = preprocessing(profile, configuration)
    if len(configuration.groups) == 1:
        ((vcpus, _),) = hosts
        flags, (per_pipeline, rest) = ["--framework", "tensorflow"], divmod(vcpus, profile.num_ranks)
    else:
        per_pipeline = math.gcd(*(vcpus for vcpus, _ in hosts))
        data_workers = {vcpus // per_pipeline for vcpus, group in hosts if is_data(group)}
        trainer_workers = {vcpus // per_pipeline for vcpus, group in hosts if not is_data(group)} or {0}
        rest = len(data_workers) + len(trainer_workers) - 2
        flags = ["--data-service", "tf", "--tf-workers-per-host", str(max(data_workers, default=0))]
        flags += ["--trainer-tf-workers", str(max(trainer_workers))]
    if rest:
        raise ConfigError(
            f"{configuration.name}: pipelines of one size cannot emulate {', '.join(configuration.groups)}\n"
            "  Expected data hosts of one size. Without data hosts, expected vCPUs that are a multiple of "
            f"the number of ranks, {profile.num_ranks}."
        )
    return Job(
        flags=tuple(flags),
        script="scripts/train_emulated_tf.py",
        script_args=(
            *("--data", str(PHOTOS), "--sample-seconds", repr(profile.sample_time_s)),
            *("--vcpus", str(per_pipeline)),
        ),
    )


BACKENDS = {
    "grpc": Backend(title="", ending="", counts_overruns=True, job=endpoint_job),
    "tf": Backend(title=", tf.data service", ending="-data-service", counts_overruns=False, job=tf_job),
}


def command(profile: Profile, configuration: Configuration, job: Job, folder: str) -> list[str]:
    """Return the arguments of `hetero` for one job. Its report goes to ``folder``."""
    steps_per_cycle = num_vcpus(profile, configuration) // profile.num_ranks
    # One more: a step ends with the delivery of the next batch.
    steps = (WARMUP_CYCLES + profile.cycles) * steps_per_cycle + 1
    step_s = profile.accelerator_step_time_s
    return [
        *("simulate", "--output-dir", folder),
        *(flag for group in configuration.groups for flag in ("--group", group)),
        *("--nproc-per-node", str(profile.num_ranks)),
        *(("--price-profile", profile.price_profile) if profile.price_profile else ()),
        *("--warmup-steps", str(WARMUP_CYCLES * steps_per_cycle)),
        *(("--emulate-step-seconds", repr(step_s)) if step_s else ()),
        *job.flags,
        *(str(HERE / job.script), "--"),
        *("--batch-size", str(profile.batch_size), "--steps", str(steps)),
        *job.script_args,
    ]


def simulate(profile: Profile, configuration: Configuration, job: Job) -> Any:
    """Run one job and return its report."""
    with tempfile.TemporaryDirectory(prefix="price-performance-") as folder:
        arguments = command(profile, configuration, job, folder)
        call([sys.executable, "-m", "hetero.cli", *arguments], configuration.name)
        return load_report(folder)


def summarise(configuration: Configuration, reports: Sequence[Any], backend: Backend) -> Outcome:
    """Return the medians over the runs of a configuration."""
    for report in reports:
        if report.headline is None or report.headline.step_time_mean is None:
            sys.exit(f"{configuration.name}: no step was measured. Set more cycles in the profile.")
    hourly = reports[0].cost.hourly
    num_overruns = sum(report.run.events.get("emulation overruns", 0) for report in reports)
    return Outcome(
        configuration=configuration,
        step_times_s=tuple(report.headline.step_time_mean.value for report in reports),
        hourly_usd=None if hourly is None else hourly.value,
        num_overruns=num_overruns if backend.counts_overruns else None,
    )


def describe_calibration(profile: Profile) -> str:
    """Say what went into the emulation."""
    return (
        f"calibrated by the homogeneous step time alone: {1000 * profile.baseline_step_time_s:g} ms x "
        f"{num_vcpus(profile, profile.baseline)} vCPUs / {profile.num_ranks * profile.batch_size} samples = "
        f"{profile.sample_time_s:.4f} s of one vCPU per sample; accelerator time "
        + (f"{profile.accelerator_step_time_s:g} s" if profile.accelerator_step_time_s else "not published, taken as 0")
    )


def render(profile: Profile, outcomes: Sequence[Outcome], backend: Backend) -> str:
    """Return the tables and what explains their difference."""
    baseline = outcomes[0]
    parts = [f"# {profile.title}{backend.title}", describe_calibration(profile), ""]
    parts += ["Simulated here:", "", price_performance_table([row(outcome, baseline) for outcome in outcomes])]
    if profile.published is not None:
        parts += ["", "Published:", "", price_performance_table(published_rows(profile, profile.published)), ""]
        printed = profile.published.printed_cost
        parts.append(
            f"The article prints {printed['homogeneous']} and {printed['heterogeneous']} as cost per step; "
            "recomputed from its own prices and times these are USD per 100 steps, shown above per 1,000."
        )
        parts += ["", *differences(profile.published, outcomes, baseline)]
    vcpus = [describe_outcome(profile, outcome) for outcome in outcomes]
    return "\n".join([*parts, "", *vcpus, "", profile.explanation.strip(), ""])


def describe_outcome(profile: Profile, outcome: Outcome) -> str:
    """Return one line: the simulated step time, the prediction from the number of vCPUs alone, and the spread."""
    expected_s = predicted_s(profile, outcome.configuration)
    runs = ", ".join(f"{1000 * value:.0f}" for value in outcome.step_times_s)
    overruns = "" if outcome.num_overruns is None else f"; {outcome.num_overruns} batches took longer than emulated"
    return (
        f"- {outcome.configuration.name}: {num_vcpus(profile, outcome.configuration)} vCPUs preprocess; arithmetic "
        f"says {1000 * expected_s:.0f} ms, simulated {1000 * outcome.step_time_s:.0f} ms "
        f"({100 * cost.relative_error(outcome.step_time_s, expected_s):+.1f} %; runs {runs} ms){overruns}"
    )


def row(outcome: Outcome, baseline: Outcome) -> PricePerformance:
    """Return the table row of a simulated configuration."""
    is_baseline = outcome is baseline
    costs = outcome.cost_usd, baseline.cost_usd
    speedup = cost.speedup(outcome.step_time_s, baseline.step_time_s)
    return PricePerformance(
        name=outcome.configuration.name,
        hosts=" + ".join(outcome.configuration.groups),
        hourly_usd=outcome.hourly_usd,
        step_time_s=outcome.step_time_s,
        per_1k_steps_usd=outcome.cost_usd,
        speedup=NOT_KNOWN if is_baseline else f"{speedup:.2f}x",
        saving=NOT_KNOWN if is_baseline or None in costs else f"{100 * cost.saving(*costs):.1f} %",
        basis="simulated",
    )


def published_rows(profile: Profile, published: Published) -> list[PricePerformance]:
    """Return the article's table, its costs recomputed."""
    times = {"homogeneous": profile.baseline_step_time_s, "heterogeneous": published.heterogeneous_step_time_s}
    costs = {name: cost.cost_per_1k_steps_usd(published.hourly_usd[name], times[name]) for name in times}
    return [
        PricePerformance(
            name=name,
            hosts="as above",
            hourly_usd=published.hourly_usd[name],
            step_time_s=times[name],
            per_1k_steps_usd=costs[name],
            speedup=NOT_KNOWN if name == BASELINE else f"{cost.speedup(times[name], times[BASELINE]):.2f}x",
            saving=NOT_KNOWN if name == BASELINE else f"{100 * cost.saving(costs[name], costs[BASELINE]):.1f} %",
            basis="published",
        )
        for name in times
    ]


def differences(published: Published, outcomes: Sequence[Outcome], baseline: Outcome) -> list[str]:
    """Return how far each prediction is from the published result."""
    lines = []
    for outcome in outcomes[1:]:
        error = cost.relative_error(outcome.step_time_s, published.heterogeneous_step_time_s)
        lines.append(
            f"- {outcome.configuration.name}: {1000 * outcome.step_time_s:.0f} ms against the published "
            f"{1000 * published.heterogeneous_step_time_s:.0f} ms ({100 * error:+.1f} %)"
        )
    return lines


def predicted_s(profile: Profile, configuration: Configuration) -> float:
    """Return what the number of vCPUs alone predicts: preprocessing scales with them, beside the accelerator."""
    ratio = num_vcpus(profile, profile.baseline) / num_vcpus(profile, configuration)
    return max(profile.accelerator_step_time_s, profile.baseline_step_time_s * ratio)


def write_result(
    path: Path, profile: Profile, outcomes: Sequence[Outcome], text: str, facts: Mapping[str, Any]
) -> None:
    """Write the result and everything that it depends on. ``path`` has no ending."""
    content = {
        "profile": dataclasses.asdict(profile),
        "outcomes": [
            {**dataclasses.asdict(outcome), "step_time_s": outcome.step_time_s, "per_1k_steps_usd": outcome.cost_usd}
            for outcome in outcomes
        ],
        "basis": "simulated",
        **facts,
    }
    save(path, content, text)
    say(f"result: {path}.json")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare clusters by simulation.", allow_abbrev=False)
    parser.add_argument("--profile", required=True, help="seed-pt, seed-tf or a file of the same form")
    parser.add_argument("--backend", choices=BACKENDS, default="grpc", help="who preprocesses (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each configuration, interleaved (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
