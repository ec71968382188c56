"""Run the job of a request on simulated hosts of this machine.

Each host gets the tree that the platform would write, with two differences: data is linked from local folders, and code
is a copy. Consecutive host names go to different groups, and the groups list their hosts backwards, because no program
may rely on a host's name or position.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.cluster import ClusterSpec, parse_cluster
from hetero.cluster.groups import StatedGroup, group_document
from hetero.cluster.platforms.sagemaker import CHANNELS, SageMaker, job_parameters
from hetero.config import LaunchOptions, resolve_options
from hetero.config.timings import time_scale
from hetero.errors import ConfigError, ExitCode
from hetero.launch.job_token import STAGED_FOLDER, TOKEN_NAME
from hetero.sagemaker.rehearsal.containers import THROUGH, Container
from hetero.sagemaker.rehearsal.inputs import LocalChannel, local_channels
from hetero.sagemaker.rehearsal.pipes import PipeFeeder
from hetero.sagemaker.request import TrainingRequest
from hetero.simulate.launchers import HostCommand, SimulatedHost
from hetero.simulate.opt_ml import write_opt_ml
from hetero.simulate.simulate import check_num_hosts, emulated_vcpus, run_hosts

__all__ = ["host_names", "plan_rehearsal", "resource_config", "run_request"]

logger = logging.getLogger(__name__)


def run_request(
    request: TrainingRequest,
    *,
    output_dir: Path,
    data: Mapping[str, Path],
    source_dir: Path | None = None,
    through: str | None = None,
    stated: Mapping[str, object] | None = None,
    vcpus: Mapping[str, int] | None = None,
    make_tls: bool = False,
) -> int:
    """Run the job of a request on simulated hosts, and return its exit code.

    Args:
        request: The request.
        output_dir: Folder for ``report.json``, ``report.md`` and ``hosts/<host>/``. It must exist.
        data: Local folder or file for each channel.
        source_dir: Folder of the user's code, if the request names an archive in S3.
        through: ``toolkit`` runs the user's entry point with SageMaker's training toolkit, and ``plain`` runs it
            directly. The default is the toolkit if it is installed. If the request has a ContainerEntrypoint, the hosts
            run this program instead.
        stated: Launch options, by name. Every host gets them in its environment.
        vcpus: Numbers of vCPUs of instance types that the catalogue does not know.
        make_tls: Whether to make certificates for the job.

    Raises:
        ConfigError: If the request cannot run on this machine. The message names what is missing.
        ClusterError: If the roles of its groups are unclear, or if the number of vCPUs to emulate is unknown.
    """
    # Check the arguments before a host starts.
    job = plan_rehearsal(
        request, output_dir=output_dir, data=data, source_dir=source_dir, through=through, stated=stated
    )
    options, channels = job.options, job.channels
    counts = {
        group.name: emulated_vcpus(
            options,
            StatedGroup(name=group.name, instance_type=group.instance_type, count=group.count),
            vcpus or {},
        )
        for group in request.groups
    }
    # Write the trees and run the hosts.
    feeders: list[PipeFeeder] = []
    # FastFile channels are links to the user's data, which programs of the job must not change.
    states_before = {channel.name: channel.state() for channel in channels if channel.mode == "FastFile"}
    # SDK 2 has the code in a folder, SDK 3 in a channel.
    code_folders = [*(channel.path for channel in channels), *([] if source_dir is None else [source_dir])]
    with contextlib.ExitStack() as stack:

        def set_up(host: SimulatedHost) -> HostCommand:
            """Write the files of a host, and return its command. The end of ``stack`` ends the host's feeders."""
            channels_of_host = [channel for channel in channels if channel.is_for(host.group)]
            feeders.extend(map(stack.enter_context, _write_opt_ml(host, request, job.cluster, channels_of_host)))
            environment = dict(job.texts)
            if (count := counts[host.group]) is not None:
                environment["HETERO_EMULATE_VCPUS"] = str(count)
            return job.container.set_up(host, environment, [channel.name for channel in channels_of_host])

        code = run_hosts(
            job.cluster,
            set_up,
            output_dir=output_dir,
            port=options.port,
            make_tls=make_tls,
            # A token of the rehearsal would take precedence over the token that came with the code.
            make_token=not any((folder / STAGED_FOLDER / TOKEN_NAME).is_file() for folder in code_folders),
            kill_after_s=job.kill_after_s,
        )
    # Report problems with channels that the hosts do not notice.
    for channel in channels:
        if channel.mode == "FastFile" and channel.state() != states_before[channel.name]:
            logger.warning(
                "a program wrote to the data of channel %s, which is read-only on the platform", channel.name
            )
    if any(feeder.has_failed for feeder in feeders):
        logger.error("a channel's data could not be read, see above. The platform would have failed the job")
        return code or ExitCode.USAGE
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A request, with the settings for running it on this machine."""

    cluster: ClusterSpec
    channels: Sequence[LocalChannel]
    container: Container
    options: LaunchOptions
    texts: Mapping[str, str]
    """Environment variables for the launch options of the caller."""
    kill_after_s: float


def plan_rehearsal(
    request: TrainingRequest,
    *,
    output_dir: Path,
    data: Mapping[str, Path],
    source_dir: Path | None,
    through: str | None,
    stated: Mapping[str, object] | None,
) -> _Job:
    """Return the job that `run_request` runs with these arguments.

    Only `run_request` checks whether the numbers of vCPUs are known.

    Raises:
        ConfigError: As for `run_request`.
        ClusterError: As for `run_request`.
    """
    texts = _option_texts(request, stated or {})
    check_num_hosts(sum(group.count for group in request.groups))
    channels = local_channels(request, data)
    container = Container.of(request, source_dir=source_dir, through=_choose(through), output_dir=output_dir)
    options = _resolve(request, texts, script=container.script)
    names = host_names([(group.name, group.count) for group in request.groups])
    document: dict[str, object] = {
        "instance_groups": [group_document(each.name, each.instance_type, names[each.name]) for each in request.groups],
        "network_interface_name": "lo",
    }
    # Each host later gets this cluster with itself as the current host, see `resource_config`.
    cluster = parse_cluster(document, current_host="algo-1", roles=options.roles, source="the request's groups")
    return _Job(
        cluster=cluster,
        channels=channels,
        container=container,
        options=options,
        texts=texts,
        # ``HETERO_TIME_SCALE`` is the factor of every default time limit, also of this one.
        kill_after_s=SageMaker.kill_after_s * time_scale(os.environ),
    )


def host_names(groups: Sequence[tuple[str, int]]) -> dict[str, list[str]]:
    """Return the host names of every group, ``algo-1`` and so on.

    Consecutive names go to different groups, because the platform does not specify which names a group gets.

    Args:
        groups: Name and number of hosts of each group.
    """
    found: dict[str, list[str]] = {name: [] for name, _ in groups}
    numbers = itertools.count(1)
    # In each turn, every group that needs more hosts gets one.
    for turn in range(max(count for _, count in groups)):
        for name, count in groups:
            if turn < count:
                found[name].append(f"algo-{next(numbers)}")
    return found


def resource_config(cluster: ClusterSpec, host: str) -> dict[str, object]:
    """Return the content of ``resourceconfig.json`` for a host."""
    # List the hosts of a group backwards, because the platform does not sort them either.
    groups = tuple(dataclasses.replace(group, hosts=group.hosts[::-1]) for group in cluster.groups)
    return dataclasses.replace(cluster, current_host=host, groups=groups).to_resource_config()


def _write_opt_ml(
    host: SimulatedHost, request: TrainingRequest, cluster: ClusterSpec, channels: Sequence[LocalChannel]
) -> list[PipeFeeder]:
    """Write the tree of a host, and return the feeders of its channels in Pipe mode."""

    def sharers(channel: LocalChannel) -> list[str]:
        """Return all hosts that get the channel, in order."""
        return [each.name for each in cluster.hosts if channel.is_for(each.group)]

    parts = host.root / "parts"
    write_opt_ml(
        host.base_dir,
        resource_config=resource_config(cluster, host.name),
        hyperparameters=request.hyperparameters,
        channels=[channel.in_tree(host.name, sharers(channel), parts) for channel in channels],
    )
    folder = host.base_dir / CHANNELS
    return [
        PipeFeeder(
            folder,
            channel.name,
            channel.files(host.name, sharers(channel)),
            is_compressed=channel.is_compressed,
        )
        for channel in channels
        if channel.mode == "Pipe"
    ]


def _choose(through: str | None) -> str:
    """Return what runs the entry point: ``through``, or by default the toolkit if it is installed."""
    has_toolkit = importlib.util.find_spec("sagemaker_training") is not None
    if through is None:
        return "toolkit" if has_toolkit else "plain"
    if through not in THROUGH:
        raise ConfigError(f"through is {through!r:.40}; expected one of {', '.join(THROUGH)}")
    if through == "toolkit" and not has_toolkit:
        raise ConfigError(
            "SageMaker's training toolkit is not installed; pip install sagemaker-training, or use through='plain'"
        )
    return through


def _option_texts(request: TrainingRequest, stated: Mapping[str, object]) -> dict[str, str]:
    """Return launch options as environment variables.

    Raises:
        ConfigError: If a hyperparameter of the request sets the same option.
    """
    texts = {}
    for name, value in stated.items():
        if f"hetero_{name}" in request.hyperparameters:
            raise ConfigError(
                f"the request has the hyperparameter hetero_{name}, which every host follows; change its value instead"
            )
        if isinstance(value, tuple | list):
            text = json.dumps([str(item) for item in value])
        else:
            # Environment variables state booleans as ``true`` and ``false``.
            text = str(value).lower() if isinstance(value, bool) else str(value)
        texts[f"HETERO_{name.upper()}"] = text
    return texts


def _resolve(request: TrainingRequest, texts: Mapping[str, str], *, script: str) -> LaunchOptions:
    """Return the launch options of the hosts, from the request and from the caller's variables."""
    # The namespace has priority over the hyperparameters, so it must not replace their script.
    default_script = None if "hetero_script" in request.hyperparameters else script
    parameters = job_parameters(request.hyperparameters, "the request's hyperparameters")
    return resolve_options(argparse.Namespace(script=default_script), {**request.environment, **texts}, parameters)
