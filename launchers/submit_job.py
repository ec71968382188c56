r"""Check, rehearse and submit a heterogeneous training job on SageMaker.

    python launchers/submit_job.py train.py --framework pytorch --framework-version 2.5 --py-version py311 \
        --group data_group=ml.c5.9xlarge:2 --group dnn_group=ml.p3.2xlarge:1 \
        --iam-role arn:aws:iam::123456789012:role/training --input training=s3://bucket/photos -- --epochs 3

The program makes an estimator with the installed SageMaker SDK, version 2 or 3, and prepares it with
`hetero.sagemaker.prepare`. It prints the findings of `hetero.sagemaker.check`, and stops after a finding of severity
error. With --rehearse, it first runs the job on simulated hosts of this machine, and submits the job only if the
rehearsal succeeds. --dry-run prints the request, after the rehearsal if there is one, instead of sending it. This needs
no account. If SageMaker lacks instances, the program submits the job again, with longer and longer waits.

The arguments after -- become hyperparameters, which the training script gets as --name value.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero.cluster.groups import StatedGroup
from hetero.errors import ConfigError, ExitCode, HeteroError
from hetero.simulate.simulate import parse_group
from hetero.system import logs

logger = logging.getLogger("hetero.submit_job")

_CLASSES = {"pytorch": ("sagemaker.pytorch", "PyTorch"), "tensorflow": ("sagemaker.tensorflow", "TensorFlow")}
_NO_ROLE = "arn:aws:iam::000000000000:role/none"
"""Role of a request that is only printed."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Exit status: 0 if the job was submitted or succeeded, 1 for findings of severity error, 25 if "
        "SageMaker lacks instances, otherwise the exit code of the rehearsal or of the job.",
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("--source-dir", type=Path, metavar="DIR", help="folder to upload, default: the script's folder")
    add = parser.add_argument_group("the job").add_argument
    add(
        "--group",
        action="append",
        default=[],
        metavar="NAME=TYPE:COUNT",
        help="an instance group, repeat for each group",
    )
    add("--framework", choices=tuple(_CLASSES), help="framework of the image, SDK 2 only; otherwise use --image")
    add("--framework-version", metavar="VERSION", help="framework version of the image")
    add("--py-version", metavar="pyNN", help="Python version of the image")
    add("--image", metavar="URI", help="image of all groups")
    add("--iam-role", metavar="ARN", help="the job's role, required without --dry-run")
    add("--region", metavar="NAME", default="us-east-1", help="AWS region of the job, default: us-east-1")
    add(
        "--input",
        action="append",
        default=[],
        metavar="CHANNEL=URI",
        help="a channel and its URI in S3, with --dry-run also a local folder",
    )
    add(
        "--input-groups",
        action="append",
        default=[],
        metavar="CHANNEL=GROUP,...",
        help="groups that get a channel; give it for all channels or none",
    )
    add(
        "--input-mode",
        choices=("File", "FastFile", "Pipe"),
        default="File",
        help="how hosts get their data, default: File",
    )
    add(
        "--environment", action="append", default=[], metavar="NAME=VALUE", help="an environment variable on every host"
    )
    add("--max-run", type=int, default=86_400, metavar="SECONDS", help="time limit of the job, default: a day")
    add("--volume-size", type=int, metavar="GIB", help="size of the EBS volume of each host")
    add("--output-path", metavar="URI", help="S3 URI for the model and the report")
    add("--checkpoint-path", metavar="URI", help="S3 URI for the checkpoints of the job")
    add("--subnet", action="append", default=[], metavar="ID", help="a subnet of your VPC, repeat for each")
    add("--security-group", action="append", default=[], metavar="ID", help="a security group, repeat for each")
    add(
        "--encrypt-traffic",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="encrypt the traffic between hosts",
    )
    add("--job-name", metavar="NAME", help="name of the job, SDK 2 only; default: derived from the script or image")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of hetero launch, such as endpoints_per_host=8",
    )
    add("--token-file", type=Path, metavar="FILE", help="file with the job's secret, default: a new secret")
    add("--wheels", type=Path, metavar="DIR", help="folder with wheels of packages that the image lacks")
    add = parser.add_argument_group("actions").add_argument
    add("--dry-run", action="store_true", help="print the request instead of sending it")
    add("--ignore-errors", action="store_true", help="continue despite findings of severity error")
    add("--rehearse", action="store_true", help="first run the job on this machine")
    add("--rehearsal-dir", type=Path, default=Path("rehearsal"), metavar="DIR", help="output, default: rehearsal")
    add("--data", action="append", default=[], metavar="CHANNEL=DIR", help="local data of a channel for the rehearsal")
    add(
        "--attempts",
        type=int,
        default=5,
        metavar="N",
        help="maximum number of submissions if instances are short, default: 5",
    )
    add(
        "--first-wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="wait before the second submission, default: 60",
    )
    add("--wait", action=argparse.BooleanOptionalAction, default=True, help="wait until the job has ended")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with the given arguments and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = make_parser().parse_args(arguments[:at])
    logs.setup_logging(group="submit", host="", role="")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the SDK logs to standard output, which is only for the result
            status, answer = _run(options, _hyperparameters(arguments[at + 1 :]))
        sys.stdout.write(answer)
        return status
    except HeteroError as error:
        sys.stderr.write(f"submit_job: error HET-{int(error.exit_code):02d}: {error}\n")
        return int(error.exit_code)
    except Exception as error:
        if not _is_rejection(error):
            raise
        sys.stderr.write(f"submit_job: error HET-{int(ExitCode.USAGE):02d}: {type(error).__name__}: {error}\n")
        return int(ExitCode.USAGE)


def _is_rejection(error: Exception) -> bool:
    """Return whether the SDK rejects the options or AWS rejects the job. Their message is then enough."""
    return isinstance(error, ValueError) or any(kind.__module__.startswith("botocore.") for kind in type(error).__mro__)


def _run(options: argparse.Namespace, hyperparameters: dict[str, str]) -> tuple[int, str]:
    """Return the exit code and the text for standard output."""
    from hetero.sagemaker import check, prepare, record, rehearse, submit

    estimator, inputs = make_estimator(options, hyperparameters)
    prepare(
        estimator,
        script=_entry_point(options)[1],
        token=True if options.token_file is None else options.token_file,
        wheels=options.wheels,
        **_launch_options(options),
    )
    findings = check(estimator, inputs)
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    if any(finding.severity == "error" for finding in findings) and not options.ignore_errors:
        sys.stderr.write("submit_job: not submitted, because of errors; correct them, or add --ignore-errors\n")
        return 1, ""
    if options.rehearse:
        done = rehearse(estimator, inputs, output_dir=options.rehearsal_dir, data=_pairs("--data", options.data))
        if done.exit_code:
            sys.stderr.write(f"submit_job: not submitted, because the rehearsal failed: {done.failure}\n")
            return done.exit_code, ""
        logger.info("the rehearsal succeeded; `hetero report %s` shows the result", options.rehearsal_dir)
    if options.dry_run:
        request = record(estimator, inputs, job_name=options.job_name).request
        return int(ExitCode.OK), json.dumps(request.document, indent=2) + "\n"
    try:
        done_job = submit(
            estimator,
            inputs,
            job_name=options.job_name,
            wait=options.wait,
            max_attempts=options.attempts,
            first_wait_s=options.first_wait,
        )
    except KeyboardInterrupt:
        sys.stderr.write(
            "submit_job: interrupted; a submitted job continues and is billed. To stop it, run: "
            "aws sagemaker stop-training-job --training-job-name NAME\n"
        )
        return 128 + signal.SIGINT, ""
    failure = f": {done_job.failure}" if done_job.failure else ""
    return done_job.exit_code, f"{done_job.job_name} {done_job.status}{failure}\n"


def make_estimator(options: argparse.Namespace, hyperparameters: dict[str, str]) -> tuple[Any, Any]:
    """Return the estimator of SDK 2, or the ``ModelTrainer`` of SDK 3, that the options describe, and its inputs.

    Raises:
        ConfigError: If options are missing or malformed, or no SDK is installed.
    """
    groups = [parse_group(text) for text in options.group]
    if not groups:
        raise ConfigError("--group is missing; expected for example --group dnn_group=ml.p3.2xlarge:1")
    if options.iam_role is None and not options.dry_run:
        raise ConfigError("--iam-role is missing; expected the ARN of the job's role")
    for channel, uri in _pairs("--input", options.input).items():
        if not uri.startswith(("s3://", "https://")) and not options.dry_run:
            raise ConfigError(
                f"--input {channel} is {uri!r}, which the job's hosts cannot read; expected a URI in S3. For a "
                f"rehearsal, add --data {channel}=DIR"
            )
    make = _trainer if _is_version_3() else _estimator
    return make(options, groups, hyperparameters, _session(options))


def _is_version_3() -> bool:
    """Return whether version 3 of the SDK is installed. It warns if a program imports a module of version 2.

    Raises:
        ConfigError: If no SDK is installed.
    """
    if importlib.util.find_spec("sagemaker") is None:
        raise ConfigError("no SageMaker SDK is installed; pip install 'sagemaker>=2.257,<3', or 'sagemaker>=3.18,<4'")
    return importlib.util.find_spec("sagemaker.train") is not None


def _session(options: argparse.Namespace) -> Any:
    """Return a session with the user's account. With --dry-run, return an offline session."""
    from hetero.sagemaker import offline_session

    if options.dry_run:
        return offline_session(options.region)
    import boto3

    if _is_version_3():
        from sagemaker.core.helper.session_helper import Session
    else:
        from sagemaker.session import Session
    return Session(boto_session=boto3.Session(region_name=options.region))


def _estimator(
    options: argparse.Namespace, groups: list[StatedGroup], hyperparameters: dict[str, str], session: Any
) -> tuple[Any, Any]:
    """Return an estimator of SDK 2 and its inputs."""
    from sagemaker.inputs import TrainingInput
    from sagemaker.instance_group import InstanceGroup

    module, name = _CLASSES.get(options.framework, ("sagemaker.estimator", "Estimator"))
    if options.framework is None and options.image is None:
        raise ConfigError("--framework and --image are missing; expected one of them, for the image of the hosts")
    folder, script = _entry_point(options)
    given: dict[str, Any] = {
        "image_uri": options.image,
        "volume_size": options.volume_size,
        "output_path": options.output_path,
        "checkpoint_s3_uri": options.checkpoint_path,
        "subnets": options.subnet or None,
        "security_group_ids": options.security_group or None,
        "environment": _pairs("--environment", options.environment) or None,
    }
    if options.framework is not None:
        given |= {"framework_version": options.framework_version, "py_version": options.py_version}
    estimator = getattr(importlib.import_module(module), name)(
        entry_point=script,
        source_dir=str(folder),
        role=options.iam_role or _NO_ROLE,
        instance_groups=[InstanceGroup(group.name, group.instance_type, group.count) for group in groups],
        hyperparameters=hyperparameters,
        max_run=options.max_run,
        encrypt_inter_container_traffic=options.encrypt_traffic,
        sagemaker_session=session,
        **{name: value for name, value in given.items() if value is not None},
    )
    owners = _groups(options)
    inputs = {
        channel: TrainingInput(uri, input_mode=options.input_mode, instance_groups=owners.get(channel))
        for channel, uri in _pairs("--input", options.input).items()
    }
    return estimator, inputs or None


def _trainer(
    options: argparse.Namespace, groups: list[StatedGroup], hyperparameters: dict[str, str], session: Any
) -> tuple[Any, Any]:
    """Return a ``ModelTrainer`` of SDK 3 and its inputs."""
    from sagemaker.core.shapes import Channel, DataSource, InstanceGroup, S3DataSource
    from sagemaker.train import ModelTrainer
    from sagemaker.train.configs import (
        CheckpointConfig,
        Compute,
        Networking,
        OutputDataConfig,
        SourceCode,
        StoppingCondition,
    )

    if options.image is None:
        raise ConfigError("--image is missing; version 3 of the SDK requires it")
    folder, script = _entry_point(options)
    instance_groups = [
        InstanceGroup(instance_group_name=group.name, instance_type=group.instance_type, instance_count=group.count)
        for group in groups
    ]
    size = {} if options.volume_size is None else {"volume_size_in_gb": options.volume_size}
    given: dict[str, Any] = {}
    if options.output_path is not None:
        given["output_data_config"] = OutputDataConfig(s3_output_path=options.output_path)
    if options.checkpoint_path is not None:
        given["checkpoint_config"] = CheckpointConfig(s3_uri=options.checkpoint_path)
    trainer = ModelTrainer(
        training_image=options.image,
        source_code=SourceCode(source_dir=str(folder), entry_script=script),
        compute=Compute(instance_groups=instance_groups, **size),
        role=options.iam_role or _NO_ROLE,
        hyperparameters=hyperparameters,
        environment=_pairs("--environment", options.environment),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=options.max_run),
        networking=Networking(
            subnets=options.subnet or None,
            security_group_ids=options.security_group or None,
            enable_inter_container_traffic_encryption=options.encrypt_traffic,
        ),
        training_input_mode=options.input_mode,
        sagemaker_session=session,
        **given,
    )
    owners = _groups(options)
    inputs = []
    for channel, uri in _pairs("--input", options.input).items():
        names = {} if channel not in owners else {"instance_group_names": owners[channel]}
        source = S3DataSource(s3_data_type="S3Prefix", s3_uri=uri, s3_data_distribution_type="FullyReplicated", **names)
        inputs.append(Channel(channel_name=channel, data_source=DataSource(s3_data_source=source)))
    return trainer, inputs or None


def _entry_point(options: argparse.Namespace) -> tuple[Path, str]:
    """Return the folder to upload, and the script relative to the folder."""
    script = Path(options.script)
    folder = options.source_dir or script.parent
    path = script if options.source_dir is None or script.is_absolute() else folder / script
    if not path.is_file():
        raise ConfigError(
            f"the training script {str(path)!r} does not exist; give its path, relative to --source-dir if there is one"
        )
    with contextlib.suppress(ValueError):
        return folder, str(path.resolve().relative_to(folder.resolve()))
    raise ConfigError(
        f"the training script {str(path)!r} is not in --source-dir {str(folder)!r}; expected a script in this folder"
    )


def _groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the groups of each channel that --input-groups names."""
    found = {channel: names.split(",") for channel, names in _pairs("--input-groups", options.input_groups).items()}
    if unknown := sorted(set(found) - set(_pairs("--input", options.input))):
        raise ConfigError(f"--input-groups names the unknown channel {unknown[0]!r}; add --input {unknown[0]}=URI")
    return found


def _launch_options(options: argparse.Namespace) -> dict[str, str]:
    found = _pairs("--option", options.option)
    for name, flag in (("script", "SCRIPT"), ("token", "--token-file"), ("wheels", "--wheels")):
        if name in found:
            raise ConfigError(f"--option {name} is not allowed; use {flag} instead")
    return found


def _hyperparameters(arguments: Sequence[str]) -> dict[str, str]:
    """Return the script's arguments, --name value or --name=value, as hyperparameters."""
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or (not equals and (not rest or rest[0].startswith("--"))):
            raise ConfigError(f"{name!r} after --: expected --name value, because the job's hosts get hyperparameters")
        found[name.removeprefix("--")] = value if equals else rest.pop(0)
    return found


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{flag} {text!r}: expected NAME=VALUE")
        found[name] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
