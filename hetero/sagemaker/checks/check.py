"""Find mistakes in a training job before the job costs money.

`check` examines an estimator. `check_request` examines a request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero.documents.findings import ERROR, WARNING, Finding, findings_json, findings_text
from hetero.sagemaker.checks import rules, security_groups
from hetero.sagemaker.recording import is_local, record, sdk_version
from hetero.sagemaker.request import TrainingRequest

__all__ = ["NUMBERS", "Finding", "check", "check_request", "findings_json", "findings_text", "unprepared"]


class _Numbered(NamedTuple):
    """A check: its title, whether its problems are errors by default, and its rule."""

    title: str
    is_error: bool
    rule: rules.Rule


_UNPREPARED = "SM-26"
_CHANNELS = "InputDataConfig"
_SOURCE = f"{_CHANNELS}[].DataSource.S3DataSource"
_ALGORITHM = "AlgorithmSpecification"
_METRICS = f"{_ALGORITHM}.MetricDefinitions"
_COMMANDS = [f"{_ALGORITHM}.Container{name}{each}" for name in ("Entrypoint", "Arguments") for each in ("", "[]")]
_RULES = {
    "SM-01": _Numbered("a distribution that starts ranks on every group", True, rules.torch_distributed),
    "SM-02": _Numbered("a distribution that is not for exactly one trainer group", True, rules.distribution_groups),
    "SM-03": _Numbered("only some channels name instance groups", True, rules.some_channels_have_groups),
    "SM-04": _Numbered("a channel for an unknown group", True, rules.channels_of_unknown_groups),
    # SM-05 was about old versions of the SDK. No other rule gets the number, because scripts may name it.
    "SM-06": _Numbered("an image for other hardware", True, rules.image_of_other_hardware),
    "SM-07": _Numbered(
        "more than five groups",
        True,
        rules.within_limits("ResourceConfig.InstanceGroups", f"{_SOURCE}.InstanceGroupNames"),
    ),
    "SM-08": _Numbered("names of groups", True, rules.group_names),
    "SM-09": _Numbered("no max_run", False, rules.unlimited_run),
    "SM-10": _Numbered("a volume size for types with local NVMe", False, rules.volume_that_is_ignored),
    "SM-11": _Numbered("no volume size for types with EBS only", True, rules.volume_that_is_missing),
    "SM-12": _Numbered("a KMS key for types with local NVMe", True, rules.key_for_local_storage),
    "SM-13": _Numbered("security groups", False, rules.security_groups),
    "SM-14": _Numbered("inter-container encryption", False, rules.traffic_encryption),
    "SM-15": _Numbered("a secret in the open", False, rules.secrets_in_the_open),
    "SM-16": _Numbered("warm pools", True, rules.warm_pool),
    "SM-17": _Numbered("local mode, or an unknown instance type", True, rules.local_types),
    "SM-18": _Numbered("both groups and an instance type", True, rules.both_forms),
    "SM-19": _Numbered("roles of the groups", False, rules.unclear_roles),
    "SM-20": _Numbered("data hosts with different data", True, rules.sharded_channels),
    "SM-21": _Numbered(
        "channels beyond the limits",
        True,
        rules.within_limits(_CHANNELS, f"{_CHANNELS}[].ChannelName", f"{_CHANNELS}[].InputMode", f"{_SOURCE}.S3Uri"),
    ),
    "SM-22": _Numbered(
        "metrics beyond the limits", True, rules.within_limits(_METRICS, f"{_METRICS}[].Name", f"{_METRICS}[].Regex")
    ),
    "SM-23": _Numbered(
        "hyperparameters beyond the limits",
        True,
        rules.within_limits("HyperParameters", "HyperParameters{keys}", "HyperParameters{}"),
    ),
    "SM-24": _Numbered(
        "environment beyond the limits", True, rules.within_limits("Environment", "Environment{keys}", "Environment{}")
    ),
    "SM-25": _Numbered(
        "anything else beyond the limits",
        True,
        rules.within_limits(
            "TrainingJobName",
            f"{_ALGORITHM}.TrainingInputMode",
            *_COMMANDS,
            "StoppingCondition.MaxRuntimeInSeconds",
            "VpcConfig.SecurityGroupIds",
            "VpcConfig.Subnets",
            "Tags",
        ),
    ),
    _UNPREPARED: _Numbered("hetero is not started", False, rules.another_program),
    "SM-27": _Numbered("a channel that no data host gets", False, rules.channels_without_data_hosts),
}
NUMBERS = {number: numbered.title for number, numbered in _RULES.items()}
"""Titles of the checks, by number."""


def check_request(request: TrainingRequest) -> list[Finding]:
    """Return the findings about a request, in the order of their numbers. Empty if all checks pass."""
    return [_finding(number, problem) for number, numbered in _RULES.items() for problem in numbered.rule(request)]


def check(estimator: Any, inputs: Any = None, *, ec2: Any = None) -> list[Finding]:
    """Return the findings about the job that an estimator would start, in the order of their numbers.

    The check uploads and sends nothing, and changes neither the estimator nor its session.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3.
        inputs: The inputs that its ``fit`` or ``train`` takes.
        ec2: boto3's client for ``ec2``. If given, the check uses it to read the rules of the security groups, which a
            request does not contain.

    Returns:
        The findings. Empty if all checks pass.

    Raises:
        ConfigError: If the object is not an estimator.
        Exception: If the SDK rejects the estimator before it sends a request.
    """
    version = sdk_version(estimator)
    # Local mode sends no request.
    if is_local(estimator):
        return [_finding("SM-17", rules.LOCAL_SESSION)]
    request = record(estimator, inputs).request
    found = check_request(request)
    # With a client, SM-13 depends on the rules of the security groups.
    if ec2 is not None:
        found = [finding for finding in found if finding.number != "SM-13"]
        found += [_finding("SM-13", problem) for problem in security_groups.seen_security_groups(request, ec2)]
    # Two mistakes with version 3 are visible only in the trainer, not in the request.
    if version == 3:
        if getattr(estimator, "distributed", None) is not None and len(request.groups) > 1:
            found.append(_finding("SM-01", rules.DRIVERS_OF_VERSION_3))
        found += _unprepared_v3(estimator, request)
    return sorted(found, key=lambda finding: finding.number)


def unprepared(estimator: Any, request: TrainingRequest) -> list[Finding]:
    """Return a finding if an estimator's job does not start hetero. Empty if the job starts hetero."""
    found = [_finding(_UNPREPARED, problem) for problem in rules.another_program(request)]
    return found if sdk_version(estimator) == 2 else _unprepared_v3(estimator, request)


def _unprepared_v3(estimator: Any, request: TrainingRequest) -> list[Finding]:
    """Return a finding if the entry script of a trainer does not start hetero, in a job with several groups."""
    script = getattr(getattr(estimator, "source_code", None), "entry_script", None)
    if not isinstance(script, str) or len(request.groups) < 2 or "hetero_script" in request.hyperparameters:
        return []
    return [] if script in rules.LAUNCHERS else [_finding(_UNPREPARED, rules.not_started(script))]


def _finding(number: str, problem: rules.Problem) -> Finding:
    """Return a problem as a finding. If a rule states no severity, the problem has the severity of its check."""
    is_error = _RULES[number].is_error if problem.is_error is None else problem.is_error
    severity = ERROR if is_error else WARNING
    return Finding(number=number, severity=severity, found=problem.found, fix=problem.fix)
