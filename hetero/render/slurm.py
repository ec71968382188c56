"""Renders a job as a batch script of Slurm. Pure."""

from __future__ import annotations

import shlex

from hetero.cluster.groups import StatedGroup
from hetero.errors import ConfigError
from hetero.render.request import GRACE_S, RenderRequest, resources_of
from hetero.render.spot import check_data_groups, notes

__all__ = ["render_slurm"]


_EXIT_CODE = "$SLURM_SUBMIT_DIR/hetero-slurm-$SLURM_JOB_ID/exit-code"


def render_slurm(request: RenderRequest, *, separate_steps: bool = False) -> str:
    """Return the script for ``sbatch``. With several groups it is a heterogeneous job, with a component per group.

    Args:
        request: The job.
        separate_steps: Whether each component has an ``srun`` of its own. Sites with ``disable_hetero_steps`` need it.

    Raises:
        ConfigError: If a group has a type of which Slurm knows nothing.
    """
    lines = [
        "#!/bin/bash",
        f"# hetero render slurm: {len(request.groups)} groups. Submit it with: sbatch FILE",
        "#",
        "# The folder from which you submit must be on a file system that all nodes share.",
        *notes(request),
    ]
    check_data_groups(request)
    for number, group in enumerate(request.groups):
        lines += [*(["#SBATCH hetjob"] if number else []), *_component(request, group)]
    lines += [
        "",
        "set -euo pipefail",
        "# The groups, in the order of the components above.",
        f"export HETERO_GROUPS={shlex.quote(request.groups_text)}",
        "export PYTHONUNBUFFERED=1",
        "# Only processes that can read this file can join the job.",
        'export HETERO_TOKEN_FILE="$SLURM_SUBMIT_DIR/.hetero-token-$SLURM_JOB_ID"',
        """trap 'rm -f "$HETERO_TOKEN_FILE"' EXIT""",
        """(umask 077; head -c 32 /dev/urandom | base64 | tr -d '=\\n' > "$HETERO_TOKEN_FILE")""",
        "",
        "# One launcher per node. A node that fails must not end the others: the job goes on without a data host.",
        *_steps(request, separate_steps=separate_steps),
    ]
    return "\n".join(lines) + "\n"


def _component(request: RenderRequest, group: StatedGroup) -> list[str]:
    """Return the directives of a group."""
    resources = resources_of(group)
    partition, account, constraint = (request.setting(name, group) for name in ("partition", "account", "constraint"))
    if not (resources.cpus or resources.gpus or partition or constraint):
        raise ConfigError(
            f"--group {group.text}: Slurm does not know the type {group.instance_type!r:.60}\n"
            f"  to do: state what a node has, for example {group.name}=GPU:8:{group.count} or "
            f"{group.name}=CPU:32:{group.count}, or give --partition {group.name}:PARTITION"
        )
    if request.is_spot(group) and not (partition or constraint):
        raise ConfigError(
            f"--spot {group.name}: Slurm has no common way to ask for spot nodes\n  to do: name the nodes that your "
            f"site has for it, with --partition {group.name}:PARTITION or --constraint {group.name}:FEATURE"
        )
    found = {
        "job-name": request.name,
        "nodes": str(group.count),
        "ntasks-per-node": "1",
        "cpus-per-task": str(resources.cpus) if resources.cpus else "",
        "gpus-per-node": str(resources.gpus) if resources.gpus else "",
        "partition": partition,
        "account": account,
        "constraint": constraint,
        "time": "" if request.hours is None else _time(request.hours),
    }
    lines = [f"# {group.name}: {group.instance_type}"]
    lines += [f"#SBATCH --{name}={value}" for name, value in found.items() if value]
    if resources.gpus:
        lines.append("#SBATCH --exclusive  # all CPUs and all memory of the nodes with GPUs")
    return [
        *lines,
        "#SBATCH --no-kill  # a lost node does not end the job",
        f"#SBATCH --signal=TERM@{GRACE_S}  # time to save a checkpoint before the time limit",
    ]


def _time(hours: float) -> str:
    minutes = max(1, round(60 * hours))
    return f"{minutes // 60}:{minutes % 60:02d}:00"


def _steps(request: RenderRequest, *, separate_steps: bool) -> list[str]:
    options = "--ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill"
    command = request.shell_command
    numbers = range(len(request.groups))
    start = [f'exit_code="{_EXIT_CODE}"', 'rm -f "$exit_code"', "code=0"]
    if len(numbers) == 1:
        steps = [f"srun {options} {command} || code=$?"]
    elif not separate_steps:
        steps = [f"srun --het-group={','.join(map(str, numbers))} {options} {command} || code=$?"]
    else:
        steps = [
            "steps=()",
            *(f"srun --het-group={number} {options} {command} & steps+=($!)" for number in numbers),
            'for step in "${steps[@]}"; do',
            "    own=0",
            '    wait "$step" || own=$?',
            '    [ "$code" -ne 0 ] || code=$own',
            "done",
        ]
    return [
        *start,
        *steps,
        "# srun ends with the code of a lost data node too. The first trainer writes down how the job ended.",
        'exit "$(cat "$exit_code" 2> /dev/null || echo "$code")"',
    ]
