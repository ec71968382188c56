"""Slurm: heterogeneous jobs, and jobs of one component whose nodes the user divides into groups.

Slurm describes a job only in variables. hetero runs one launcher per node, under ``srun --ntasks-per-node=1``:

- Heterogeneous job: one ``srun`` for all components, or one for each. ``SLURM_HET_SIZE`` is the number of components,
  and ``SLURM_JOB_NODELIST_HET_GROUP_k`` has the nodes of component k. Slurm before 20.02 has other variables, which
  hetero does not read.
- One component: ``HETERO_GROUPS`` divides its nodes into groups, in the order of the node list. Without this variable,
  all nodes are one group, which trains. In a heterogeneous job, ``HETERO_GROUPS`` names the components, in their order.

No variable names the component of this node. Under one ``srun`` for all components, ``SLURM_PROCID`` and
``SLURM_NODEID`` count over all components, and ``SLURM_JOB_NODELIST`` has the nodes of all components. Therefore hetero
looks for the name of this node, ``SLURMD_NODENAME``, in the node lists of the components.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from hetero.cluster.document import MAX_FILE_BYTES, MAX_GROUPS, MAX_HOSTS, listing
from hetero.cluster.groups import GROUPS_VARIABLE, StatedGroup, group_document, stated_groups
from hetero.cluster.platforms.platform import ClusterDescription, Folders, JobParameters, Platform
from hetero.cluster.rendering.request import GRACE_S, RenderRequest, resources_of
from hetero.cluster.rendering.spot import check_data_groups, notes
from hetero.documents.diagnosis import Diagnosis, warning
from hetero.errors import ConfigError
from hetero.system.waits import CALL_TIMEOUT_S, STOP_GRACE_S

__all__ = ["Slurm", "node_names"]

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""The ports of launchers. Bug report: two jobs on one CPU node both took port 17170. Sites number jobs in sequence, so
jobs that run at the same time differ in the last four digits. Ports from 32768 on may belong to connections."""
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_EXIT_CODE = "$SLURM_SUBMIT_DIR/hetero-slurm-$SLURM_JOB_ID/exit-code"
_NO_KILL = re.compile(r"^#SBATCH\s.*(--no-kill|-k\b)", re.MULTILINE)
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]+)", re.MULTILINE)
_SCHEDULER = re.compile(r"^SchedulerParameters\s*=\s*(.*)$", re.MULTILINE)
_COUNTS = re.compile(r"([0-9]{1,6})(?:\(x[0-9]{1,6}\))?(?:,|$)")


class Slurm(Platform):
    """A step of a Slurm job."""

    name = "slurm"
    variables = ("SLURM", "PMI_", "PMI2_", "PMIX_", "SRUN_")
    stripped = (
        # If frameworks find these variables, they assume that srun has started one task per rank.
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS"),
        *("SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "PMI_", "PMI2_", "PMIX_"),
    )
    source = "SLURM_*"
    renders = "a batch script for sbatch"
    settings: ClassVar[Mapping[str, str]] = {
        "partition": "partition",
        "account": "account",
        "constraint": "features that the nodes must have",
    }

    def is_here(self) -> bool:
        """Return whether this process belongs to a Slurm job."""
        return bool(self.environ.get("SLURM_JOB_ID"))

    def describe(self) -> ClusterDescription:
        """Return the groups of the job and this node's name."""
        self._check_step()
        components = self._components() or [self._node_list(self._node_list_variable)]
        stated = stated_groups(self.environ)
        if len(components) > 1:
            groups = self._of_components(components, stated)
        else:
            groups = self._divided(components[0], stated)
        # Identify this node by its name. SLURM_NODEID is its number among the nodes of srun, which may be the nodes of
        # all components or of one.
        own_node = self.environ.get("SLURMD_NODENAME", "")
        if not own_node:
            raise self._error("SLURMD_NODENAME is not set", "the name of this node", "start the launcher with srun")
        return self._described(groups, own_node)

    @property
    def folders(self) -> Folders:
        """Folders below the folder where the user submitted the job, which all nodes share."""
        submitted = Path(self.environ.get("SLURM_SUBMIT_DIR") or Path.cwd())
        base = submitted / f"hetero-{self.job_name() or 'job'}"
        return Folders(
            root=submitted,
            output=base,
            failure=base / "failure",
            model=base / "model",
            checkpoints=submitted / "checkpoints",
            code=submitted,
            # srun ends with the highest exit code, even if only a data node was lost. So the job's code is in this
            # file.
            exit_code=base / "exit-code",
        )

    def job_name(self) -> str:
        """Return ``slurm-JOBID``. A heterogeneous job has the id of its first component."""
        number = self.environ.get("SLURM_JOB_ID_HET_GROUP_0") or self.environ.get("SLURM_JOB_ID", "")
        return f"slurm-{number}" if number else ""

    def parameters(self) -> JobParameters:
        """Return the default of the port, which depends on the job's number, because jobs may share a node."""
        number = self.job_name().rpartition("-")[2]
        has_number = number.isascii() and number.isdigit()
        return JobParameters(
            values={},
            source="the job's number",
            defaults={"port": _FIRST_PORT + int(number) % _NUM_PORTS} if has_number else {},
        )

    def num_gpus(self) -> int | None:
        """Return the GPUs of this node that belong to the job. None if Slurm does not state them."""
        stated = self.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(stated) if stated.isascii() and stated.isdigit() else None

    @property
    def _node_list_variable(self) -> str:
        """Variable with the nodes of this step, which may have fewer nodes than the job."""
        # A step smaller than its allocation once waited 900 s for nodes outside of it.
        return "SLURM_STEP_NODELIST" if self.environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"

    def _check_step(self) -> None:
        """Raise `ClusterError` if srun did not start one launcher on each node."""
        is_started_by_srun = "SLURM_STEP_ID" in self.environ
        if not is_started_by_srun and self._num_nodes() > 1:
            raise self._error(
                "no SLURM_STEP_ID, so the batch script itself started the launcher, on the first node only",
                "one launcher on each node",
                "start it with srun --ntasks-per-node=1, see hetero render slurm",
            )
        # Such as "1(x3),2": one task on each of three nodes, and two tasks on the fourth node.
        tasks = self.environ.get("SLURM_STEP_TASKS_PER_NODE") or self.environ.get("SLURM_TASKS_PER_NODE", "1")
        if is_started_by_srun and any(int(number) > 1 for number in _COUNTS.findall(tasks)):
            raise self._error(
                f"SLURM_STEP_TASKS_PER_NODE is {tasks:.100}, so srun started several launchers on a node",
                "one launcher on each node, which starts the ranks itself",
                "give srun --ntasks-per-node=1, and hetero launch --nproc-per-node for the ranks",
            )

    def _num_nodes(self) -> int:
        """Return the number of nodes of the whole job, which may have more nodes than this step."""
        return sum(map(len, self._components())) or len(self._node_list("SLURM_JOB_NODELIST"))

    def _components(self) -> list[list[str]]:
        """Return the nodes of each component. Empty for a job that is not heterogeneous."""
        if "SLURM_PACK_SIZE" in self.environ and "SLURM_HET_SIZE" not in self.environ:
            # Without this error, each component would be a job of its own.
            raise self._error(
                "SLURM_PACK_SIZE is set, so Slurm is older than 20.02",
                "SLURM_HET_SIZE",
                "use a newer Slurm, or describe the cluster with --cluster-file",
            )
        expected = f"a number from 1 to {MAX_GROUPS}"
        num_components = self._number("SLURM_HET_SIZE", default="0", largest=MAX_GROUPS, expected=expected)
        return [self._node_list(f"SLURM_JOB_NODELIST_HET_GROUP_{number}") for number in range(num_components)]

    def _node_list(self, variable: str) -> list[str]:
        """Return the names of the nodes that a variable lists. Raise `ClusterError` if it is missing or malformed."""
        text = self.environ.get(variable, "")
        if not text:
            raise self._error(
                f"{variable} is not set", "the nodes of the job", "start the launcher with srun in the job"
            )
        try:
            names = node_names(text)
        except ValueError as error:
            raise self._error(
                f"{variable} is {text!r:.100}: {error}", "a node list such as nid[001-004,007]"
            ) from error
        return names

    def _of_components(
        self, components: Sequence[Sequence[str]], stated: Sequence[StatedGroup]
    ) -> list[dict[str, object]]:
        """Return one group for each component of a heterogeneous job.

        Args:
            components: The nodes of each component.
            stated: The groups in `GROUPS_VARIABLE`. Without them, the names of the components' jobs are used.
        """
        component_of: dict[str, int] = {}
        for number, nodes in enumerate(components):
            shared_node = next((node for node in nodes if node in component_of), None)
            if shared_node is not None:
                raise self._error(
                    f"node {shared_node} belongs to the components {component_of[shared_node]} and {number}",
                    "each node in one component",
                    "request the nodes with --exclusive, or with constraints that no node meets twice",
                )
            component_of.update(dict.fromkeys(nodes, number))
        counts = [len(nodes) for nodes in components]
        if stated and [group.count for group in stated] != counts:
            raise self._error(
                f"{GROUPS_VARIABLE} has {listing(group.text for group in stated)}, and the components have "
                f"{listing(counts)} nodes",
                "one group for each component, with as many hosts as it has nodes",
                f"correct {GROUPS_VARIABLE} or remove it",
            )
        if stated:
            return [
                group_document(group.name, group.instance_type, nodes)
                for group, nodes in zip(stated, components, strict=True)
            ]
        group_names = [self._of_component("SLURM_JOB_NAME", number) for number in range(len(components))]
        # Groups need different names. Several components may have the same name, or none.
        if len(set(group_names)) < len(group_names) or not all(group_names):
            partitions = [self._of_component("SLURM_JOB_PARTITION", number) for number in range(len(components))]
            group_names = [f"{partition or 'component'}-{number}" for number, partition in enumerate(partitions)]
        return [
            group_document(name, self._resources(number), nodes)
            for number, (name, nodes) in enumerate(zip(group_names, components, strict=True))
        ]

    def _of_component(self, variable: str, number: int) -> str:
        """Return the value of a variable that Slurm sets for each component. Empty without the variable."""
        return self.environ.get(f"{variable}_HET_GROUP_{number}", "")

    def _resources(self, number: int) -> str:
        """Return what a node of a component has, ``GPU:8`` or ``CPU:32``. Empty if Slurm does not say."""
        for variable in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
            # The value may have the type of the GPUs before their number: a100:8.
            count = self._of_component(variable, number).rpartition(":")[2]
            if count.isascii() and count.isdigit() and int(count):
                return f"GPU:{int(count)}"
        cpus = _COUNTS.match(self._of_component("SLURM_JOB_CPUS_PER_NODE", number))
        return f"CPU:{int(cpus[1])}" if cpus else ""

    def _divided(self, nodes: Sequence[str], stated: Sequence[StatedGroup]) -> list[dict[str, object]]:
        """Return the groups of a job with one component. If none are stated, all nodes are one group, which trains."""
        if not stated:
            gpus = self.num_gpus()
            return [group_document("trainer", f"GPU:{gpus}" if gpus else "", nodes)]
        total = sum(group.count for group in stated)
        if total != len(nodes):
            raise self._error(
                f"{GROUPS_VARIABLE} has {total} hosts, and {self._node_list_variable} has {len(nodes)} nodes",
                "groups that have all nodes together",
                f"correct {GROUPS_VARIABLE}, or the --nodes of srun or of the job",
            )
        # Each group takes as many nodes as it has hosts, in the order of the node list.
        remaining = iter(nodes)
        return [
            group_document(group.name, group.instance_type, list(itertools.islice(remaining, group.count)))
            for group in stated
        ]

    def examine(self, own_host: str | None, port: int) -> Iterator[Diagnosis]:
        """Yield what the configuration of this site and the batch script do to a job."""
        config = _output("scontrol", "show", "config")
        wait = _KILL_WAIT.search(config)
        # Ranks get half of the time, because the hosts need the rest to end.
        if wait is not None and float(wait[1]) / 2 < STOP_GRACE_S:
            yield warning(
                f"KillWait of this site is {wait[1]} s, so after scancel ranks have {float(wait[1]) / 2:.0f} s to save",
                "end jobs with scancel --signal=TERM first, or save checkpoints during the training",
            )
        parameters = _SCHEDULER.search(config)
        is_heterogeneous = self.environ.get("SLURM_HET_SIZE", "1") != "1"
        if is_heterogeneous and parameters is not None and "disable_hetero_steps" in parameters[1]:
            yield warning(
                "this site has disable_hetero_steps, so one srun cannot start several components",
                "start one srun for each component: hetero render slurm --separate-steps",
            )
        script = _output("scontrol", "write", "batch_script", self.environ.get("SLURM_JOB_ID", ""), "-")
        if script and _NO_KILL.search(script) is None:
            yield warning(
                "the batch script has no --no-kill, so the loss of a data node ends the whole job",
                "add #SBATCH --no-kill to each component, as hetero render slurm does",
            )

    @classmethod
    def render(cls, request: RenderRequest) -> str:
        """Return the script for ``sbatch``. Several groups make a heterogeneous job, with a component each.

        Raises:
            ConfigError: If a group has a type that Slurm does not know.
        """
        lines = [
            "#!/bin/bash",
            f"# hetero render slurm: {len(request.groups)} groups. Submit it with: sbatch FILE",
            "#",
            "# The folder where you submit must be on a file system that all nodes share.",
            *notes(request),
        ]
        check_data_groups(request)
        # A line "hetjob" separates the components of a heterogeneous job.
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
            *_steps(request),
        ]
        return "\n".join(lines) + "\n"


def node_names(text: str) -> list[str]:
    """Return the nodes of a node list such as ``nid[00001,00011-00012],gpu-[1-2]-[1-4]``, in its order.

    Numbers keep their leading zeros. A part with several brackets means all combinations of their numbers. The last
    bracket changes fastest.

    Raises:
        ValueError: If the text is malformed, or has more than 4,096 nodes.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{len(text)} characters are more than {MAX_FILE_BYTES}")
    names: list[str] = []
    for part in _parts(text):
        # Pieces with an odd index are the contents of brackets.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any("[" in piece or "]" in piece for piece in pieces[::2]):
            raise ValueError(f"the brackets of {part!r:.60} do not match")
        columns = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        for combination in itertools.product(*columns):
            names.append("".join(combination))
            if len(names) > MAX_HOSTS:
                raise ValueError(f"there are more than {MAX_HOSTS} nodes")
    if not all(names):
        raise ValueError("a name is empty")
    return names


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between the commas that are outside of brackets."""
    depth = begin = 0
    for at, character in enumerate(text):
        # Node lists never have brackets inside of brackets.
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"the brackets of {text!r:.60} do not match")
        if character == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    if depth:
        raise ValueError(f"the brackets of {text!r:.60} do not match")
    yield text[begin:]


def _numbers(text: str) -> list[str]:
    """Return the numbers of a bracket, with their leading zeros."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r:.40} is no number and no range")
        low, high = match[1], match[2] or match[1]
        # Check the range before its numbers are listed, because a range of twelve digits would take all memory.
        if int(high) < int(low) or int(high) - int(low) >= MAX_HOSTS:
            raise ValueError(f"{part!r:.40} is no range of at most {MAX_HOSTS} numbers")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        if len(found) > MAX_HOSTS:
            raise ValueError(f"there are more than {MAX_HOSTS} nodes")
    return found


def _component(request: RenderRequest, group: StatedGroup) -> list[str]:
    """Return the directives of a group."""
    resources = resources_of(group)
    partition, account, constraint = (request.setting(name, group) for name in ("partition", "account", "constraint"))
    # Slurm knows no instance types, so something else must choose the nodes.
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


def _steps(request: RenderRequest) -> list[str]:
    """Return the lines that start the launchers, and end the script with the job's exit code.

    One ``srun`` starts the launchers of all groups. Sites with ``disable_hetero_steps`` forbid this. For them the user
    sets ``separate_steps``, and each group gets an ``srun``.
    """
    # A launcher that fails, or a node that is lost, must not end the other launchers.
    options = "--ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill"
    command = request.shell_command
    numbers = range(len(request.groups))
    first_lines = [f'exit_code="{_EXIT_CODE}"', 'rm -f "$exit_code"', "code=0"]
    if len(numbers) == 1:
        steps = [f"srun {options} {command} || code=$?"]
    elif not request.separate_steps:
        steps = [f"srun --het-group={','.join(map(str, numbers))} {options} {command} || code=$?"]
    else:
        # Wait for every srun, and keep the exit code of the first one in the list that failed.
        steps = [
            "steps=()",
            *(f"srun --het-group={number} {options} {command} & steps+=($!)" for number in numbers),
            'for step in "${steps[@]}"; do',
            "    step_code=0",
            '    wait "$step" || step_code=$?',
            '    [ "$code" -ne 0 ] || code=$step_code',
            "done",
        ]
    return [
        *first_lines,
        *steps,
        "# srun ends with the code of a lost data node too. The first trainer writes the job's code to a file.",
        'exit "$(cat "$exit_code" 2> /dev/null || echo "$code")"',
    ]


def _output(*command: str) -> str:
    """Return what a program of Slurm writes. Empty if the program is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return process.stdout if process.returncode == 0 else ""
