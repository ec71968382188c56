"""``hetero canary``: forecast a whole job from short runs on a few percent of its data."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hetero import config
from hetero.cli.arguments import Subparsers, add_list, number, numbers, pairs, whole_number
from hetero.cli.interrupts import run_interruptible
from hetero.cli.output import say
from hetero.config.flags import MoreWords
from hetero.errors import ConfigError, ExitCode
from hetero.system.scripts import find_script, script_label

if TYPE_CHECKING:
    from hetero.decide.canary.design import Cluster

__all__ = ["add"]

_NOT_FOR_RUNS = ("script", "script_args", "output_dir", "profile")
"""Options that are not passed on: the canary sets the first three for each run, and no run is a profile run."""


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "canary",
        allow_abbrev=False,
        help="forecast a whole job from short runs on a few percent of its data",
        description="Run a training script on a few percent of its data, several times, on simulated hosts. Forecast "
        "time, cost, CPU, memory and GPU of the whole job, each with a 90 % prediction interval, or refuse with the "
        "reason. See docs/canary.md.",
        epilog="exit status: 0 all candidates have a forecast of the time, 1 one was refused, 2 the command line is "
        "wrong, 26 --budget-hours ended the study, 130 or 143 SIGINT or SIGTERM did (the forecast from the runs that "
        "ended is written)",
    )
    parser.add_argument(
        "--fractions",
        default="1%,2%,3%",
        metavar="PERCENT",
        action=MoreWords,
        more=re.compile(r"[\d.]+%"),
        help="at least three fractions of the data, each at most 50%%, the largest at least twice the smallest. "
        "Default: 1%% 2%% 3%%",
    )
    parser.add_argument(
        "--repeats", default="3", metavar="N", help="runs of each fraction, at most 200 in all. Default: 3"
    )
    add_list(
        parser,
        "--group",
        "NAME=TYPE:COUNT",
        "instance group of the job, for example trainer=ml.m5.xlarge:2. Repeat for each group",
    )
    add_list(
        parser,
        "--candidate",
        "GROUPS",
        "cluster to compare, as groups with commas, for example trainer=ml.m5.4xlarge:6. Repeat for each. It "
        "replaces --group",
    )
    add_list(
        parser,
        "--channel",
        "NAME=DIR",
        "folder of an input channel. Each run gets a fraction of its files. Repeat for each channel",
    )
    add_list(parser, "--whole", "NAME", "channel that every run gets whole, such as a validation set. Repeat for each")
    add_list(parser, "--keep", "PATTERN", "files that every run gets, such as labels.csv. Repeat for each pattern")
    parser.add_argument(
        "--samples", action="store_true", help="hetero's loaders use a fraction of their samples, not of the files"
    )
    parser.add_argument(
        "--whole-samples", metavar="N", help="samples of the whole job, for {samples} in the script's arguments"
    )
    add_list(
        parser, "--memory", "TYPE=GIB", "memory of a host. Default: that of the instance type. Repeat for each type"
    )
    add_list(
        parser,
        "--as-fast-as",
        "TYPE",
        "this machine is as fast as a host of this type, so the forecast has costs. Repeat for each type",
    )
    parser.add_argument(
        "--cache",
        choices=("cold", "warm"),
        default="cold",
        help="cold: drop the files of a run from the page cache before it, as on a new machine. Default: cold",
    )
    add_list(parser, "--accept", "RULE", "rule that must not refuse a forecast, for example cpu-cache. Repeat for each")
    parser.add_argument("--budget-hours", metavar="HOURS", help="longest time of all canary runs together")
    parser.add_argument("--part-seed", default="0", metavar="N", help="seed that chooses files or samples. Default: 0")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of an earlier start")
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    config.add_launch_arguments(parser, makes_cluster=True)
    parser.set_defaults(run=functools.partial(run_interruptible, _run))


def _run(namespace: argparse.Namespace) -> int:
    """Run the canaries, and write the forecast. Return 1 if the time of a candidate has no forecast."""
    import logging

    from hetero.decide.canary.conducting import run_canaries
    from hetero.decide.canary.design import CanaryRequest, parse_fractions
    from hetero.decide.canary.forecast import ForecastOptions
    from hetero.decide.canary.model import RULES
    from hetero.decide.canary.output.text import canary_text
    from hetero.decide.studies.executors import SimulateExecutor
    from hetero.decide.studies.plan import catalogue_of
    from hetero.decide.studies.study import progress_text
    from hetero.decide.studies.study_file import Budget
    from hetero.documents.records import json_text
    from hetero.system import logs

    # Check the command line before the first run.
    if namespace.script is None:
        raise ConfigError("no training script is given; expected its path after the options")
    unknown = next((rule for rule in namespace.accept if rule not in RULES), None)
    if unknown is not None:
        raise ConfigError(f"--accept {unknown!r:.60}: expected one of {', '.join(RULES)}")
    is_module = bool(namespace.module)
    whole_samples = namespace.whole_samples
    if whole_samples is not None:
        whole_samples = whole_number("--whole-samples", whole_samples)
    request = CanaryRequest(
        script=namespace.script,
        script_path=find_script(namespace.script, is_module=is_module),
        script_args=tuple(namespace.script_args),
        clusters=_clusters(namespace),
        fractions=parse_fractions(namespace.fractions.split(",")),
        repeats=whole_number("--repeats", namespace.repeats),
        channels={name: Path(path) for name, path in pairs("--channel", namespace.channel, "NAME=DIR")},
        whole_channels=frozenset(namespace.whole),
        keep=tuple(namespace.keep),
        by_samples=namespace.samples,
        whole_samples=whole_samples,
        options=_launch_options(namespace),
        as_fast_as=frozenset(namespace.as_fast_as),
        seed=whole_number("--part-seed", namespace.part_seed, least=0),
    )
    hours = namespace.budget_hours
    if hours is not None:
        hours = number("--budget-hours", hours, "a number of hours above 0, for example 1.5")
    logs.setup_logging(group="canary", host="", role="", level=namespace.log_level or "info")
    logger = logging.getLogger(__name__)
    folder = Path(namespace.output_dir or Path("canaries") / script_label(namespace.script, is_module=is_module))
    catalogue = catalogue_of(request.options)
    report = run_canaries(
        request,
        folder,
        executor=SimulateExecutor(catalogue=catalogue),
        catalogue=catalogue,
        memory_gib=numbers("--memory", namespace.memory, "GIB", above=0, most=1e6),
        options=ForecastOptions(accept=tuple(namespace.accept)),
        budget=Budget(hours=hours),
        is_cold=namespace.cache == "cold",
        fresh=namespace.fresh,
        on_progress=lambda progress: logger.info("%s", progress_text(progress)),
    )
    say(json_text(report) if namespace.json else canary_text(report))
    logger.info("forecast: %s", folder / "canary.html")
    is_refused = any(candidate.refused("time") for candidate in report.candidates)
    return 1 if is_refused else int(ExitCode.OK)


def _clusters(namespace: argparse.Namespace) -> tuple[Cluster, ...]:
    """Return the clusters to compare: each ``--candidate``, or the cluster of all ``--group``."""
    from hetero.decide.canary.design import Cluster
    from hetero.simulate.simulate import parse_group

    if namespace.group and namespace.candidate:
        raise ConfigError("--group and --candidate are both given; expected one --candidate for each cluster")
    candidates = [tuple(text.split(",")) for text in namespace.candidate] or [tuple(namespace.group)]
    # Reject a malformed group now, not in the first run.
    for group in itertools.chain(*candidates):
        parse_group(group)
    # Without --group and --candidate, the only candidate has no groups. `run_canaries` reports this.
    return tuple(Cluster(groups=groups) for groups in candidates if groups)


def _launch_options(namespace: argparse.Namespace) -> dict[str, object]:
    """Return the options of the launchers of all runs: the stated ones, and defaults for short runs."""
    # argparse has None or an empty list for an option that is not stated.
    names = {field.name for field in dataclasses.fields(config.LaunchOptions)} - set(_NOT_FOR_RUNS)
    stated = {name: value for name in sorted(names) if (value := getattr(namespace, name, None)) not in (None, [])}
    # Short runs need frequent readings, and few steps of warm-up. The check of purity computes the first batches twice,
    # which would be a larger share of a short run than of the whole job.
    return {"usage_interval_s": "0.1", "warmup_steps": "3", "purity_checks": "0", **stated}
