"""What ``hetero check`` and ``hetero simulate`` do with the request for a training job."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from hetero import config
from hetero.cluster import slug
from hetero.documents.files import make_output_folder
from hetero.documents.findings import ERROR, findings_json, findings_text
from hetero.errors import ConfigError
from hetero.sagemaker.checks.check import check_request
from hetero.sagemaker.rehearsal.local_job import run_request
from hetero.sagemaker.request import read_request
from hetero.system import logs

__all__ = ["check", "simulate"]


def check(path: Path, *, as_json: bool) -> tuple[str, int]:
    """Return the findings about a request as text or JSON, and the exit code. It is 1 if a finding is an error."""
    findings = check_request(read_request(path))
    text = findings_json(findings) if as_json else findings_text(findings)
    return text, int(any(finding.severity == ERROR for finding in findings))


def simulate(namespace: argparse.Namespace, *, data: Mapping[str, Path], vcpus: Mapping[str, int]) -> int:
    """Run the job of a request on this machine, and return its exit code.

    Args:
        namespace: Arguments of ``hetero simulate``.
        data: Folder of each channel that the command line names.
        vcpus: Number of vCPUs of instance types that the catalogue lacks.
    """
    if namespace.group or namespace.script is not None or namespace.script_args or namespace.config is not None:
        raise ConfigError(
            "a request has groups, script and options; remove --group, SCRIPT, its arguments and --config"
        )
    request = read_request(namespace.request)
    # The request states the script and its arguments. `run_request` gets the output folder as an argument.
    names = {field.name for field in dataclasses.fields(config.LaunchOptions)} - {"output_dir", "script", "script_args"}
    # The parser uses None or an empty list for an option that the command line does not state.
    stated = {name: value for name in names if (value := getattr(namespace, name, None)) not in (None, [])}
    logs.setup_logging(group="simulate", host="", role="", level=namespace.log_level or "info")
    output_dir = Path(namespace.output_dir or Path("runs") / slug(request.name))
    make_output_folder(output_dir)
    return run_request(
        request,
        output_dir=output_dir,
        data=data,
        source_dir=namespace.source_dir,
        through=namespace.through,
        stated=stated,
        vcpus=vcpus,
        make_tls=namespace.tls,
    )
