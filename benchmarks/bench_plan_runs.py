"""Does a job take as long per step as `hetero.decide.planning` says, and do its intervals contain the truth?

Question: how far is the predicted step time of a job on a cluster from the step time of the job when it really runs
there? How many of the stated 90 % intervals contain the real step time?

Method: each job is profiled by `hetero simulate --profile` on its trainer hosts alone. `StepModel` reads the
`profile.json` and predicts the step time on one or more other clusters. Then `hetero simulate` runs the job on each of
them, with the real launcher, ranks, endpoints and data plane. The truth is the mean step time of its report, after the
first steps. The compute of a step is a wait. In most jobs a sample is a wait on an emulated vCPU, and a wait in the
data set in the jobs *storage* and *skewed*. All emulated vCPUs are equally fast, so the model gets their relative speed
of 1. The network of the job *network* is the loopback of a network namespace behind a token bucket (needs root and
iproute2). The other jobs send few bytes.

Bounds: absolute error of at most 10 % in the median and 20 % in the 95th percentile, and 80 to 97 % of the intervals
contain the truth.

    python benchmarks/bench_plan_runs.py
    python benchmarks/bench_plan_runs.py --short              # three jobs
    python benchmarks/bench_plan_runs.py --only hosts network

Results, with hardware and versions, go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness

from hetero.decide.planning.candidates import Candidate, DataGroup
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.model import StepModel
from hetero.metrics.profile.profile import PROFILE_FILE_NAME, Profile, load_profile
from hetero.pricing import Catalogue
from hetero.report import load_report
from hetero.simulate.simulate import parse_group

TRAINER = "ml.p3.2xlarge"
WARMUP_STEPS = 40
SECONDS = 10.0
"""Length of the measured steps of a run, by the prediction."""
LONG_EPOCH = 4000
SHORT_EVERY = 3
"""The short form takes every third job."""
MEDIAN_ERROR, P95_ERROR = 0.10, 0.20
COVERAGE = (0.80, 0.97)
_BUCKET_BYTES = 256 * 1024
_QUEUE_MS = 50
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that the profile does not know."""

    name: str
    data: tuple[str, ...] = ()
    """Groups of data hosts, as TYPE:COUNT."""
    trainer_endpoints: int = 0
    """Endpoints on each trainer host. Those of an emulated host share all its vCPUs, so their number is that of the
    vCPUs."""
    endpoints_per_host: int = 0
    """Endpoints of each data host. 0 means one per vCPU."""
    network_bytes_per_s: float = 0.0
    """Bandwidth of the loopback. 0 means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job and the clusters that it runs on."""

    name: str
    clusters: tuple[Cluster, ...]
    step_s: float
    """Compute of a step."""
    sample_s: float = 0.0
    """Seconds of an emulated vCPU for a sample. 0: samples are not emulated."""
    wait_s: float = 0.0
    """Mean seconds that the data set waits for a sample."""
    sigma: float = 0.0
    """Standard deviation of the logarithm of this wait."""
    batch_samples: int = 8
    sample_bytes: int = 16
    ranks: int = 1
    """Ranks per trainer host."""
    trainer_hosts: int = 1
    steps_per_epoch: int = LONG_EPOCH
    profiled_endpoints: int = 0
    """Endpoints on the trainer host in the profile. 0 means the default: every emulated vCPU, or loader processes."""
    loader_processes: int = 0


JOBS = (
    Job(
        name="hosts",
        step_s=0.03,
        sample_s=0.06,
        clusters=(
            Cluster(name="below-saturation", data=("ml.c5.2xlarge:1",)),
            Cluster(name="at-saturation", data=("ml.c5.4xlarge:1",)),
            Cluster(name="above-saturation", data=("ml.c5.4xlarge:2",)),
            Cluster(name="two-types", data=("ml.c5.2xlarge:1", "ml.m5.xlarge:1")),
            Cluster(name="hybrid", data=("ml.c5.xlarge:1",), trainer_endpoints=8),
        ),
    ),
    Job(
        name="storage",
        step_s=0.02,
        wait_s=0.02,
        batch_samples=16,
        loader_processes=2,
        clusters=(
            Cluster(name="four-endpoints", data=("ml.c5.2xlarge:1",), endpoints_per_host=4),
            Cluster(name="twelve-endpoints", data=("ml.c5.2xlarge:2",), endpoints_per_host=6),
        ),
    ),
    Job(
        name="two-ranks",
        step_s=0.04,
        sample_s=0.05,
        ranks=2,
        clusters=(Cluster(name="one-host", data=("ml.c5.2xlarge:1",)),),
    ),
    Job(
        name="network",
        step_s=0.02,
        sample_s=0.004,
        batch_samples=32,
        sample_bytes=65_536,
        clusters=(
            Cluster(name="40-mb-per-s", data=("ml.c5.xlarge:1",), network_bytes_per_s=40e6),
            Cluster(name="25-mb-per-s", data=("ml.c5.xlarge:1",), network_bytes_per_s=25e6),
        ),
    ),
    Job(
        name="free-cpus",
        step_s=0.02,
        wait_s=0.02,
        batch_samples=16,
        profiled_endpoints=2,
        clusters=(Cluster(name="six-endpoints", trainer_endpoints=6),),
    ),
    Job(
        name="skewed",
        step_s=0.03,
        wait_s=0.02,
        sigma=1.2,
        batch_samples=16,
        loader_processes=2,
        clusters=(
            Cluster(name="below-saturation", data=("ml.c5.2xlarge:1",), endpoints_per_host=6),
            Cluster(name="above-saturation", data=("ml.c5.2xlarge:1",), endpoints_per_host=14),
        ),
    ),
    Job(
        name="two-trainer-hosts",
        step_s=0.02,
        sample_s=0.05,
        trainer_hosts=2,
        clusters=(
            Cluster(name="one-host", data=("ml.c5.2xlarge:1",)),
            Cluster(name="hybrid", data=("ml.c5.2xlarge:1",), trainer_endpoints=8),
        ),
    ),
    Job(
        name="short-epoch",
        step_s=0.04,
        sample_s=0.05,
        steps_per_epoch=16,
        clusters=(
            Cluster(name="below-saturation", data=("ml.c5.xlarge:1",)),
            Cluster(name="above-saturation", data=("ml.c5.4xlarge:1",)),
        ),
    ),
    Job(
        name="accelerator",
        step_s=0.1,
        sample_s=0.02,
        clusters=(Cluster(name="one-host", data=("ml.c5.xlarge:1",)),),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The predicted and the real step time of a job on a cluster."""

    job: str
    cluster: str
    predicted_s: float
    low_s: float
    high_s: float
    bottleneck: str
    real_s: float
    num_steps: int
    """Measured steps of the real run."""
    load: float
    """Load average of the machine during the run, as tasks per CPU."""

    @property
    def error(self) -> float:
        """Predicted / real - 1."""
        return self.predicted_s / self.real_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the real step time."""
        return self.low_s <= self.real_s <= self.high_s


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the jobs, run them on their clusters, and write the table."""
    args = parse_arguments(argv)
    jobs = (
        [job for job in JOBS if job.name in args.only] if args.only else list(JOBS[:: SHORT_EVERY if args.short else 1])
    )
    facts, begin_s = harness.environment(), time.monotonic()
    outcomes: list[Outcome] = []
    profiles: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        for job, (profile, found) in zip(jobs, pool.map(run_job, jobs), strict=True):
            profiles[job.name] = figures_of(profile)
            outcomes += found
    duration_s = round(time.monotonic() - begin_s, 1)
    text = render(outcomes)
    print(text, flush=True)
    scope = "partial" if args.only else "short" if args.short else "full"
    folder = args.results or (harness.RESULTS if scope == "full" else harness.RESULTS / "short")
    content = {
        "benchmark": "plan_runs",
        "scope": scope,
        "basis": "simulated",
        "duration_s": duration_s,
        "num_parallel": args.parallel,
        **facts,
        "jobs": [asdict(job) for job in jobs],
        "profiles": profiles,
        "rows": [{**asdict(each), "error": each.error, "is_inside": each.is_inside} for each in outcomes],
    }
    loads = [each.load for each in outcomes]
    footer = (
        f"{scope.capitalize()} form. {facts['date']}, commit {facts['commit']}, {facts['hardware']['cpus']} CPUs. "
        f"{len(outcomes)} runs of {len(jobs)} jobs in {duration_s / 60:.0f} minutes, {args.parallel} at a time. "
        f"The machine had {min(loads):.1f} to {max(loads):.1f} running tasks per CPU."
    )
    path = folder / ("plan_runs-partial" if scope == "partial" else "plan_runs")
    harness.save(path, content, f"{text}\n\n{footer}\n")
    harness.say(f"result: {path}.json")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0], allow_abbrev=False)
    parser.add_argument("--short", action="store_true", help=f"every {SHORT_EVERY}rd job")
    parser.add_argument("--only", nargs="+", choices=[job.name for job in JOBS], help="jobs to run")
    parser.add_argument("--parallel", type=int, default=1, help="jobs that run at the same time (%(default)s)")
    parser.add_argument("--results", type=Path, help="folder of the result")
    return parser.parse_args(argv)


# Runs


def profile_of(job: Job) -> Profile:
    """Return the profile of a job on its trainer hosts alone."""
    with tempfile.TemporaryDirectory(prefix="plan-runs-") as folder:
        alone = Cluster(name="profile", trainer_endpoints=job.profiled_endpoints)
        arguments = command(job, alone, folder, num_steps=LONG_EPOCH, is_profile=True)
        harness.call(arguments, f"{job.name}, profile", timeout_s=_TIMEOUT_S)
        return load_profile(Path(folder) / PROFILE_FILE_NAME)


def run_job(job: Job) -> tuple[Profile, list[Outcome]]:
    """Profile a job and run it on its clusters."""
    harness.say(f"plan-runs: {job.name}: profile")
    profile = profile_of(job)
    outcomes = []
    for cluster in job.clusters:
        outcomes.append(run(job, cluster, profile))
        harness.say(f"plan-runs: {row(outcomes[-1])}")
    return profile, outcomes


def run(job: Job, cluster: Cluster, profile: Profile) -> Outcome:
    """Predict the step time of a job on a cluster and run it there."""
    candidate = candidate_of(job, cluster)
    speeds = {group.machine.instance_type: 1.0 for group in candidate.data}
    model = StepModel(profile, vcpu_speeds=speeds, endpoints_per_host=cluster.endpoints_per_host or None)
    (prediction,) = model.predict([candidate])
    num_steps = steps_of(job, cluster, candidate, prediction.step_s)
    with tempfile.TemporaryDirectory(prefix="plan-runs-") as folder:
        arguments = command(job, cluster, folder, num_steps=WARMUP_STEPS + num_steps + 1)
        harness.call(arguments, f"{job.name}, {cluster.name}", timeout_s=_TIMEOUT_S)
        report: Any = load_report(folder)
        load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return Outcome(
        job=job.name,
        cluster=cluster.name,
        predicted_s=prediction.step_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        bottleneck=prediction.bottleneck,
        real_s=report.headline.step_time_mean.value,
        num_steps=num_steps,
        load=load,
    )


def command(job: Job, cluster: Cluster, folder: str, *, num_steps: int, is_profile: bool = False) -> list[str]:
    """Return the command of a job. It writes its report or its profile to the folder."""
    groups = [f"dnn_group={TRAINER}:{job.trainer_hosts}"]
    groups += [f"data_group_{number}={group}" for number, group in enumerate(cluster.data)]
    flags = ["--trainer-endpoints", str(cluster.trainer_endpoints)]
    if cluster.endpoints_per_host:
        flags += ["--endpoints-per-host", str(cluster.endpoints_per_host)]
    if job.sample_s:
        flags += ["--emulate-sample-seconds", repr(job.sample_s)]
    return [
        *(limited(cluster.network_bytes_per_s) if cluster.network_bytes_per_s else ()),
        *(sys.executable, "-m", "hetero.cli", "simulate", "--output-dir", folder),
        *(["--profile"] if is_profile else ["--warmup-steps", str(WARMUP_STEPS)]),
        *(flag for group in groups for flag in ("--group", group)),
        *("--role", "dnn_group=trainer"),
        *(flag for number in range(len(cluster.data)) for flag in ("--role", f"data_group_{number}=data")),
        *("--nproc-per-node", str(job.ranks), "--purity-checks", "0", *flags),
        *("--emulate-step-seconds", repr(job.step_s), str(harness.HERE / "scripts" / "train_planned.py"), "--"),
        *("--batch-size", str(job.batch_samples), "--steps", str(num_steps)),
        *("--steps-per-epoch", str(job.steps_per_epoch), "--sample-bytes", str(job.sample_bytes)),
        *("--wait-s", repr(job.wait_s), "--sigma", repr(job.sigma), "--num-workers", str(job.loader_processes)),
    ]


def limited(bytes_per_s: float) -> list[str]:
    """Return the begin of a command that runs in a network namespace whose loopback has a bandwidth."""
    bucket = f"rate {round(8 * bytes_per_s)}bit burst {_BUCKET_BYTES} latency {_QUEUE_MS}ms"
    script = f'ip link set lo up && tc qdisc add dev lo root tbf {bucket} && exec "$@"'
    return ["unshare", "--net", "sh", "-c", script, "sh"]


def candidate_of(job: Job, cluster: Cluster) -> Candidate:
    """Return the cluster as the model sees it."""
    network = cluster.network_bytes_per_s or None
    groups = [parse_group(f"data_group={group}") for group in cluster.data]
    return Candidate(
        trainer=machine_of(job, TRAINER, network),
        num_trainer_hosts=job.trainer_hosts,
        local_endpoints=cluster.trainer_endpoints,
        data=tuple(
            DataGroup(machine=machine_of(job, group.instance_type, network), count=group.count) for group in groups
        ),
    )


def machine_of(job: Job, instance_type: str, network_bytes_per_s: float | None) -> Machine:
    """Return a simulated host. It has this machine's CPUs if samples are not emulated."""
    vcpus = Catalogue.load().get(instance_type).vcpus if job.sample_s else len(os.sched_getaffinity(0))
    assert vcpus is not None, instance_type
    return Machine(instance_type=instance_type, vcpus=vcpus, network_bytes_per_s=network_bytes_per_s)


def steps_of(job: Job, cluster: Cluster, candidate: Candidate, step_s: float) -> int:
    """Return the steps to measure: whole rounds of all endpoints, because endpoints that begin together stay together.

    In an epoch that is short, whole epochs are more important.
    """
    per_host = [cluster.endpoints_per_host or group.machine.vcpus for group in candidate.data]
    num_endpoints = sum(each * group.count for each, group in zip(per_host, candidate.data, strict=True))
    num_endpoints += cluster.trainer_endpoints * job.trainer_hosts
    unit = num_endpoints if job.steps_per_epoch == LONG_EPOCH else job.steps_per_epoch
    return unit * math.ceil(SECONDS / step_s / unit)


def figures_of(profile: Profile) -> dict[str, Any]:
    """Return the figures of a profile that explain its predictions."""
    training, supply = profile.training, profile.supply[0]
    return {
        "step_s": training.step_s.mean,
        "headspace_s": training.headspace_s.mean,
        "data_wait_s": training.data_wait_s.mean,
        "num_local_processes": training.num_local_processes,
        "steps_per_epoch": training.steps_per_epoch,
        "sample_cpu_s": supply.sample_cpu_s.mean,
        "sample_wait_s": supply.sample_wait_s.mean,
        "sample_wait_variation": supply.sample_wait_s.variation,
        "batch_cpu_s": supply.batch_cpu_s.mean,
        "wire_bytes_per_sample": None if profile.wire_bytes_per_sample is None else profile.wire_bytes_per_sample.value,
        "notes": profile.notes,
    }


# The table


def render(outcomes: Sequence[Outcome]) -> str:
    """Return the table, and each figure with its bound."""
    errors = sorted(abs(outcome.error) for outcome in outcomes)
    p95 = errors[math.ceil(0.95 * len(errors)) - 1]
    share = statistics.fmean(outcome.is_inside for outcome in outcomes)
    met = "met" if COVERAGE[0] <= share <= COVERAGE[1] else "**MISSED**"
    coverage = (
        f"- share of the intervals that contain the real step time: {share:.3f} of {len(outcomes)}, "
        f"{COVERAGE[0]:g} to {COVERAGE[1]:g} wanted: {met}"
    )
    return "\n".join(
        [
            "# The predicted and the real step time",
            "",
            "Step times in ms. The real ones are measured in jobs with emulated parts.",
            "",
            "| job | cluster | bottleneck | predicted | 90 % interval | real | error | inside | tasks per CPU |",
            "|---|---|---|---:|---:|---:|---:|---|---:|",
            *(row(outcome) for outcome in outcomes),
            "",
            harness.target("absolute error, median", statistics.median(errors), MEDIAN_ERROR, at_most=True),
            harness.target("absolute error, 95th percentile", p95, P95_ERROR, at_most=True),
            coverage,
        ]
    )


def row(outcome: Outcome) -> str:
    """Return a row of the table."""
    predicted, low, high, real = (
        f"{1000 * value:.1f}" for value in (outcome.predicted_s, outcome.low_s, outcome.high_s, outcome.real_s)
    )
    return (
        f"| {outcome.job} | {outcome.cluster} | {outcome.bottleneck} | {predicted} | {low} to {high} | {real} "
        f"| {100 * outcome.error:+.1f} % | {'yes' if outcome.is_inside else '**no**'} | {outcome.load:.1f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
