"""Rules: small functions, each for one kind of mistake or hidden cost in a request.

A rule takes a request and yields a `Problem` for each mistake. `hetero.sagemaker.checks.check` numbers the rules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hetero.cluster import Role
from hetero.errors import HeteroError, first_line
from hetero.launch.job_token import LAUNCHER_NAME
from hetero.sagemaker.checks.facts import (
    assigned_roles,
    hardware,
    image_hardware,
    is_secret,
    member,
    roles_of,
    sizes_if_not_among,
    storage_gb,
)
from hetero.sagemaker.limits import breaches, limits
from hetero.sagemaker.request import TrainingRequest

__all__ = ["Problem", "Rule", "within_limits"]

SDK_MAX_RUN_S = 86400
"""Default time limit of a job in seconds, in version 2 of the SDK and in the service."""
V3_MAX_RUN_S = 3600
"""Default time limit of a job in seconds, in version 3 of the SDK."""
SDK_VOLUME_GB = 30
"""Default volume size in GB, in both versions of the SDK."""

LAUNCHERS = (LAUNCHER_NAME, "launcher.py")
"""Entry points of prepared jobs, and of jobs whose users added the launcher by hand."""
_REHEARSE = "name the instance types of the job, and run it on this machine with hetero.sagemaker.rehearse"
_PATH_CHARACTERS = re.compile(r"[/\\\x00-\x1f]|^\.{1,2}$")


class Problem(NamedTuple):
    """One mistake that a rule found in a request."""

    found: str
    fix: str
    is_error: bool | None = None
    """Whether the mistake is an error instead of a warning. None for the default in `hetero.sagemaker.checks.check`.

    An error makes the job fail, or do something else than the user wants.
    """


Rule = Callable[[TrainingRequest], Iterator[Problem]]


def torch_distributed(request: TrainingRequest) -> Iterator[Problem]:
    """Report ``torch_distributed`` with groups. The SDK ignores the stated group, so all groups start torchrun."""
    if len(request.groups) > 1 and request.parameter("sagemaker_torch_distributed_enabled"):
        # torchrun then starts hetero's launcher, so the job works.
        has_launcher = "hetero_script" in request.hyperparameters
        addition = " hetero's launcher holds back all but one of them." if has_launcher else ""
        yield Problem(
            f"torch_distributed is on with {len(request.groups)} groups. The SDK drops the group that it is for, and "
            f"every group starts its own torchrun, also on data hosts.{addition}",
            "leave out distribution=. hetero's launcher starts the ranks of the trainer group",
            is_error=not has_launcher,
        )


def distribution_groups(request: TrainingRequest) -> Iterator[Problem]:
    """Report a distribution for no group, several groups, an unknown group, or a group that only prepares data."""
    if len(request.groups) < 2:
        return
    listed = request.parameter("sagemaker_distribution_instance_groups")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    # Both strategies start ranks with MPI. `torch_distributed` reports the third strategy.
    strategies = ("sagemaker_mpi_enabled", "sagemaker_distributed_dataparallel_enabled")
    is_on = any(request.parameter(name) for name in strategies)
    known = [group.name for group in request.groups]
    fix = "in distribution['instance_groups'], name exactly one group, the one that trains. Or leave out distribution="
    if len(names) > 1:
        yield Problem(f"the distribution is for {len(names)} groups, {_listed(names)}. SageMaker runs it on one", fix)
    elif is_on and not names:
        yield Problem("the distribution names no group, so every group starts its own MPI, also on data hosts", fix)
    elif names and names[0] not in known:
        yield Problem(f"the distribution is for the unknown group {names[0]!r}. The request has {_listed(known)}", fix)
    elif names and roles_of(request).get(names[0]) is Role.DATA:
        yield Problem(f"the distribution is for {names[0]!r}, whose hosts only prepare data", fix)


def some_channels_have_groups(request: TrainingRequest) -> Iterator[Problem]:
    """Report requests that name groups for only some channels, because the service rejects them."""
    without = [channel.name for channel in request.channels if not channel.groups]
    if 0 < len(without) < len(request.channels):
        fix = "give instance_groups=[...] to every channel, or to none. For data that every host needs, name all groups"
        # Before 3.18.0, version 3 of the SDK gave no groups to the channels that the SDK itself adds.
        if "sm_drivers" in without:
            fix += " Version 3 of the SDK adds sm_drivers, and needs 3.18 or newer."
        yield Problem(
            f"channels {_listed(without)} name no instance groups, but others do. SageMaker rejects such a mix", fix
        )


def channels_of_unknown_groups(request: TrainingRequest) -> Iterator[Problem]:
    """Report a channel for an unknown group."""
    known = [group.name for group in request.groups]
    for channel in request.channels:
        if unknown := [name for name in channel.groups if name not in known]:
            yield Problem(
                f"channel {channel.name!r} is for unknown group {_listed(unknown)}. The request has {_listed(known)}",
                "write the group's name as in the estimator's instance_groups",
            )


def sharded_channels(request: TrainingRequest) -> Iterator[Problem]:
    """Report a channel that gives different files to each data host."""
    roles = roles_of(request)
    for channel in request.channels:
        groups = [group for group in request.groups if not channel.groups or group.name in channel.groups]
        hosts = sum(group.count for group in groups if roles.get(group.name) is Role.DATA)
        if channel.is_sharded and hosts > 1:
            yield Problem(
                f"channel {channel.name!r} is ShardedByS3Key, so each of the {hosts} data hosts gets different files",
                "use distribution='FullyReplicated', because hetero asks any data host for any sample and rejects data "
                "sets that differ. FastFile mode downloads only the files that are read",
            )


def channels_without_data_hosts(request: TrainingRequest) -> Iterator[Problem]:
    """Report channels that only trainer hosts get, although data hosts build the data set."""
    roles = roles_of(request)
    data_groups = [name for name, role in roles.items() if role is Role.DATA]
    only_for_trainers = [
        channel.name
        for channel in request.channels
        if channel.groups and all(roles.get(name) is Role.TRAINER for name in channel.groups)
    ]
    # A job whose data hosts lacked a channel once passed the check, and failed after it had begun. This is only a
    # warning, because a channel may be for the ranks alone.
    if data_groups and only_for_trainers:
        yield Problem(
            f"no data host gets the channels {_listed(only_for_trainers)}, and data hosts build the data set",
            f"name {_listed(data_groups)} in their instance_groups too, unless only the ranks read them",
        )


def image_of_other_hardware(request: TrainingRequest) -> Iterator[Problem]:
    """Report an image that does not support the accelerators of a group."""
    image = member(request, "AlgorithmSpecification.TrainingImage", str, "")
    kind = image_hardware(image)
    for group in request.groups:
        needed = hardware(group.instance_type)
        # Instances without accelerators run all images.
        if kind is None or needed in ("cpu", kind):
            continue
        yield Problem(
            f"the image {image.rpartition('/')[2]!r} is for {kind.upper()}, but group {group.name!r} of "
            f"{group.instance_type} needs one for {needed.upper()}. All groups get the same image",
            "put that group first in instance_groups, or name the image in image_uri or training_image. Version 2 of "
            "the SDK takes the image of the first group whose type starts with g or p, or else of the first group",
        )
        # All groups get the same image, so one problem is enough.
        return


def group_names(request: TrainingRequest) -> Iterator[Problem]:
    """Report group names that the service rejects, that are not unique, or that cannot be the name of a folder."""
    fix = "give every group a different name of at most 64 letters, digits, - and _"
    if broken := breaches(request.document, limits()["ResourceConfig.InstanceGroups[].InstanceGroupName"]):
        yield Problem(f"a group's name is too long or empty: {broken}", fix)
    names = [group.name for group in request.groups]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        yield Problem(f"more than one group has the name {_listed(twice)}", fix)
    if paths := [name for name in names if _PATH_CHARACTERS.search(name)]:
        yield Problem(
            f"the group name {_listed(paths)} has characters of paths. SageMaker accepts them", fix, is_error=False
        )


def unlimited_run(request: TrainingRequest) -> Iterator[Problem]:
    """Report a request with a default time limit.

    The default of version 3 of the SDK stops every job after an hour. With the default of version 2 and of the service,
    a job that hangs costs a whole day.
    """
    seconds = member(request, "StoppingCondition.MaxRuntimeInSeconds", int, None)
    # Only version 3 of the SDK adds this channel.
    is_v3 = any(channel.name == "sm_drivers" for channel in request.channels)
    hosts = ", ".join(f"{group.count} x {group.instance_type}" for group in request.groups)
    if seconds == V3_MAX_RUN_S and is_v3:
        yield Problem(
            f"the service stops the job after {V3_MAX_RUN_S} s, the default of version 3 of the SDK, even if it is not "
            f"done. It still bills {hosts} for that hour",
            "set StoppingCondition(max_runtime_in_seconds=...) to the expected time plus a margin, but not to 3600",
        )
    # With version 3, whose default is an hour, a day is the user's own choice.
    elif seconds is None or (seconds == SDK_MAX_RUN_S and not is_v3):
        yield Problem(
            f"a job that hangs ends only after the default of {SDK_MAX_RUN_S} s. The service bills a day of {hosts}",
            "set max_run=... to the expected time in seconds plus a margin, but not to 86400",
        )


def volume_that_is_ignored(request: TrainingRequest) -> Iterator[Problem]:
    """Report a volume size for types with local storage, which get no volume."""
    size_gb = member(request, "ResourceConfig.VolumeSizeInGB", int, 0)
    # The SDK itself states 30 GB, so the user has not chosen this size.
    if size_gb in (0, SDK_VOLUME_GB):
        return
    # Keep the groups whose type has local storage. `storage_gb` returns 0 for a type with EBS only, and None for an
    # unknown type.
    local_gb = {group: found for group in request.groups if (found := storage_gb(group))}
    # A type with larger local storage has room for the data without the volume.
    reported = [group for group in local_gb if local_gb[group] < size_gb]
    # If all groups lack EBS, the size changes nothing. Report this for one of the groups.
    if not reported and len(local_gb) == len(request.groups):
        reported = [request.groups[0]]
    for group in reported:
        yield Problem(
            f"the request has a volume of {size_gb} GB, but {group.instance_type} of group {group.name!r} gets no "
            f"volume. It has {local_gb[group]} GB of local NVMe",
            "use the local storage, take a type with more of it, or read the data with FastFile. If no group has EBS, "
            "leave out volume_size",
        )


def volume_that_is_missing(request: TrainingRequest) -> Iterator[Problem]:
    """Report a missing volume size for types without local storage."""
    size_gb = member(request, "ResourceConfig.VolumeSizeInGB", int, 0)
    with_ebs_only = [group for group in request.groups if storage_gb(group) == 0]
    if with_ebs_only and not size_gb:
        group = with_ebs_only[0]
        yield Problem(
            f"VolumeSizeInGB is missing, but {group.instance_type} of group {group.name!r} has only EBS storage",
            "set volume_size=... to the GB that the data of File channels, checkpoints and the model need",
        )


def key_for_local_storage(request: TrainingRequest) -> Iterator[Problem]:
    """Report a KMS key for types with local storage. The service rejects it, because hardware encrypts the data."""
    with_local_storage = [group for group in request.groups if storage_gb(group)]
    key = member(request, "ResourceConfig.VolumeKmsKeyId", str, "")
    if with_local_storage and key:
        yield Problem(
            f"the request has a VolumeKmsKeyId, which SageMaker rejects for types with local NVMe such as "
            f"{with_local_storage[0].instance_type} of group {with_local_storage[0].name!r}",
            "leave out volume_kms_key, also as a default of the account. The hardware encrypts local NVMe",
        )


def security_groups(request: TrainingRequest) -> Iterator[Problem]:
    """Warn about hosts in the user's VPC, because the request does not show whether they can reach each other."""
    names = member(request, "VpcConfig.SecurityGroupIds", list, [])
    if not names or _num_hosts(request) < 2:
        return
    more = " With inter-container encryption, also allow UDP 500 and protocol 50 (ESP)."
    yield Problem(
        f"the hosts are in security groups {_listed([str(name) for name in names])}. The request does not show whether "
        "they let the hosts reach each other",
        f"allow all TCP ports from and to the security group itself.{more if _is_encrypted(request) else ''} Otherwise "
        "the job waits until its start timeout, and the service bills it",
    )


def traffic_encryption(request: TrainingRequest) -> Iterator[Problem]:
    """Warn if the service encrypts the traffic between hosts, because it then encrypts every batch."""
    if _num_hosts(request) > 1 and _is_encrypted(request):
        has_tls = "hetero_tls_dir" in request.hyperparameters
        addition = " TLS of hetero_tls_dir encrypts them a second time." if has_tls else ""
        yield Problem(
            f"inter-container encryption is on. It encrypts all batches, which costs throughput.{addition}",
            "measure with and without it. Without it and hetero_tls_dir, gRPC is in plaintext inside the job's network",
        )


def secrets_in_the_open(request: TrainingRequest) -> Iterator[Problem]:
    """Report values that look like secrets in members that describe-training-job shows."""
    places = (("Environment", request.environment), ("HyperParameters", request.hyperparameters))
    for place, values in places:
        if names := [name for name, value in values.items() if is_secret(name, value)]:
            yield Problem(
                f"{place} has a secret in {_listed(names)}. Everyone who may call DescribeTrainingJob can read it",
                "for hetero's token, use prepare(estimator, token=...), which sends it as a file. For other secrets, "
                "read AWS Secrets Manager in the script. If this request was sent, make a new secret",
                # None is the severity of this check, a warning.
                is_error=True if any(name.lower().startswith("hetero_token") for name in names) else None,
            )


def warm_pool(request: TrainingRequest) -> Iterator[Problem]:
    """Report a warm pool with instance groups, because the service does not support it."""
    seconds = member(request, "ResourceConfig.KeepAlivePeriodInSeconds", int, 0)
    if seconds and request.is_heterogeneous:
        yield Problem(
            f"KeepAlivePeriodInSeconds is {seconds}, but warm pools do not support instance groups",
            "leave out keep_alive_period_in_seconds",
        )


def both_forms(request: TrainingRequest) -> Iterator[Problem]:
    """Report a request with both instance groups and an instance type or count for all hosts."""
    config = request.document["ResourceConfig"]
    both = [name for name in ("InstanceType", "InstanceCount") if config.get(name) is not None]
    if request.is_heterogeneous and both:
        yield Problem(
            f"ResourceConfig has both InstanceGroups and {_listed(both)}", "leave out instance_type and instance_count"
        )


def local_types(request: TrainingRequest) -> Iterator[Problem]:
    """Report types of local mode, types that the service does not have, and unknown sizes of a known family."""
    for group in request.groups:
        if group.instance_type in ("local", "local_gpu"):
            yield Problem(
                f"group {group.name!r} is of type {group.instance_type!r}. Local mode does not support instance groups",
                _REHEARSE,
            )
        elif not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", group.instance_type):
            yield Problem(
                f"group {group.name!r} is of type {group.instance_type!r}, which SageMaker does not have",
                "name a type such as ml.c5.9xlarge. `hetero prices list` shows the known types",
            )
        # Empty for a known type, and for a type whose family is not known.
        elif sizes := sizes_if_not_among(group.instance_type):
            yield Problem(
                f"group {group.name!r} is of type {group.instance_type!r}, a size that hetero does not know",
                f"name one of {', '.join(sizes)}, or keep the type if SageMaker has introduced it since",
                is_error=False,
            )


def unclear_roles(request: TrainingRequest) -> Iterator[Problem]:
    """Report groups whose roles are unclear, and jobs without a group that prepares data."""
    # A job of one group needs no roles, and `group_names` reports equal names.
    names = {group.name for group in request.groups}
    if len(names) < 2 or len(names) < len(request.groups):
        return
    try:
        roles = assigned_roles(request)
    except HeteroError as error:
        yield Problem(
            first_line(error),
            'set the hyperparameter hetero_roles, such as \'["NAME=data", "NAME=trainer"]\', or rename the groups',
        )
        return
    if Role.DATA not in roles.values():
        yield Problem(
            f"no group prepares data. The groups {_listed(list(roles))} all train",
            "set the hyperparameter hetero_roles, such as '[\"NAME=data\"]', with the group that prepares data",
        )


def another_program(request: TrainingRequest) -> Iterator[Problem]:
    """Report an entry point of SDK 2 that is not the launcher, in a job with groups. Data hosts would train, too."""
    program = request.parameter("sagemaker_program")
    if len(request.groups) < 2 or "hetero_script" in request.hyperparameters or not isinstance(program, str):
        return
    if program not in LAUNCHERS:
        yield not_started(program)


LOCAL_SESSION = Problem(
    "the estimator is for the SDK's local mode, which does not support instance groups",
    _REHEARSE,
)
"""The SDK's local mode, which only the estimator shows."""
DRIVERS_OF_VERSION_3 = Problem(
    "the trainer has distributed=. The drivers of version 3 of the SDK span all groups, also data hosts",
    "leave out distributed=. hetero's launcher starts the ranks of the trainer group",
)
"""``distributed=`` of version 3 with groups, which only the trainer shows."""


def within_limits(*paths: str) -> Rule:
    """Return a rule that reports values at the given paths that exceed the service's limits."""

    def look(request: TrainingRequest) -> Iterator[Problem]:
        for path in paths:
            limit = limits()[path]
            if broken := breaches(request.document, limit):
                yield Problem(broken, f"stay within SageMaker's limits: {limit.source}")

    return look


def not_started(program: str) -> Problem:
    """Return the problem of an entry point that is not the launcher, in a job with several groups."""
    return Problem(
        f"every host runs {program[:80]!r}, also data hosts. The request does not show that it starts hetero",
        "call prepare(estimator), or make launchers/launcher.py the entry point and set hyperparameter hetero_script",
    )


def _num_hosts(request: TrainingRequest) -> int:
    return sum(group.count for group in request.groups)


def _is_encrypted(request: TrainingRequest) -> bool:
    return request.document.get("EnableInterContainerTrafficEncryption") is True


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name[:80]) for name in names)
