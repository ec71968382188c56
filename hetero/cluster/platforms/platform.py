"""The interface of a platform, and the base of platforms that take only the cluster from elsewhere."""

from __future__ import annotations

import hashlib
import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hetero.cluster.description import host_names, parse_cluster
from hetero.cluster.document import MAX_HOSTS
from hetero.cluster.rendering.request import RenderRequest
from hetero.cluster.spec import ClusterSpec, Role, slug
from hetero.documents.diagnosis import Diagnosis
from hetero.errors import ClusterError, ConfigError

__all__ = [
    "ClusterDescription",
    "Folders",
    "JobParameters",
    "Platform",
    "PlatformWrapper",
    "Registration",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """What a platform tells a host about the hosts of its job."""

    document: Mapping[str, object]
    """The groups and hosts, in the schema of ``resourceconfig.json``. It is not validated."""
    source: str
    """Origin of the document, for messages."""
    own_names: Sequence[str] = ()
    """Names of this machine. The first one that is a host of the cluster replaces a missing ``current_host``."""
    roles: Sequence[str] = ()
    """Roles of groups whose names and instance types do not show them, each ``GROUP=data`` or ``GROUP=trainer``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The folders of a job on one host. They need not exist."""

    root: Path
    """Folder that the platform fills. If it does not exist, no platform runs this job or reads a failure file."""
    output: Path
    """Folder for results. The hosts of a job may share it, so each host writes to a separate folder in it."""
    failure: Path
    """File whose text the platform shows as the reason of a failure."""
    model: Path
    checkpoints: Path
    code: Path
    """The user's code."""
    exit_code: Path | None = None
    """File for the job's exit code, which the first trainer host writes. None if the platform does not need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParameters:
    """The parameters that the user gave to the platform with the job."""

    values: Mapping[str, object]
    """All parameters by name. The parameters of hetero are named ``hetero_<option>``."""
    source: str
    """Origin of the parameters, for messages."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of options on this platform, by name. Everything that the user states overrides them."""
    script_arguments: Sequence[str] | None = None
    """Arguments for the training script, made from the other parameters. None if the command line has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How the hosts of a job find one another if the platform tells them only the address of a main host."""

    num_hosts: int
    """Number of hosts of the job."""
    main_address: str
    """Numeric address of the main host. Empty on the main host itself."""
    group: str
    """Group of this host."""
    instance_type: str
    groups: tuple[str, ...]
    """Names of all groups in order."""


class Platform(ABC):
    """A platform that runs jobs. It reads only the environment and files, except in `examine`.

    Args:
        environ: The process environment. It is copied, because a launcher changes its own.
    """

    name: ClassVar[str]
    variables: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the variables that describe a job."""
    renders: ClassVar[str] = ""
    """What `render` writes, for the help of ``hetero render``. Empty if it writes nothing."""
    settings: ClassVar[Mapping[str, str]] = {}
    """Settings of a job that only this platform has, for `render`: the description of each setting by its name."""
    stripped: tuple[str, ...] = ()
    """Prefixes of variables that ranks must not inherit, because a program in a rank would misread them."""
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    """Signals that ask a job to stop."""
    own_address: str = ""
    """Numeric address of this host, if its name does not give it."""
    may_change: bool = False
    """Whether data hosts can be added to the description while the job runs."""
    source: ClassVar[str] = ""
    """The variables that describe the cluster, for messages: ``SLURM_*``."""
    kill_after_s: float = 30.0
    """Seconds from the signal until the platform kills the processes of the job. The default is the time of AWS Batch
    (docs.aws.amazon.com/batch/latest/userguide/job_timeouts.html), of Vertex AI, of Kubernetes
    (``terminationGracePeriodSeconds``), and of Slurm (``KillWait`` in slurm.conf, which a job cannot read)."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    @abstractmethod
    def is_here(self) -> bool:
        """Return whether this process runs in a job of this platform. Does not raise."""

    @abstractmethod
    def describe(self) -> ClusterDescription:
        """Return the description of the cluster.

        Raises:
            ClusterError: If the description is missing, or if it cannot be decoded.
        """

    @property
    @abstractmethod
    def folders(self) -> Folders:
        """The folders of the job on this host."""

    @abstractmethod
    def job_name(self) -> str:
        """Return the platform's name of the job, which is the same on all hosts. Empty for a job without a name."""

    def parameters(self) -> JobParameters | None:
        """Return the parameters of the job, None for a platform without parameters.

        Raises:
            ConfigError: If the parameters cannot be read.
        """
        return None

    def registration(self) -> Registration | None:
        """Return how this host finds the other hosts. None if `describe` lists them.

        Raises:
            ClusterError: If the environment is malformed.
        """
        return None

    def num_gpus(self) -> int | None:
        """Return the number of accelerators of this host, None if the platform does not say."""
        return None

    def own_variables(self, cluster: ClusterSpec) -> dict[str, str]:
        """Return the variables that identify this host. mpirun, for example, may set the variables of another host."""
        return {}

    def examine(self, own_host: str | None, port: int) -> Iterator[Diagnosis]:
        """Yield what ``hetero doctor`` reports of this platform: how it ends jobs, and what it may lose.

        Args:
            own_host: Name of this host in the cluster, None if it is not known.
            port: Port of launchers.
        """
        yield from ()

    @classmethod
    def render(cls, request: RenderRequest) -> str:
        """Return the script or manifest that starts a job.

        Raises:
            ConfigError: If the platform cannot run such a job, or hetero writes nothing for it.
        """
        raise ConfigError(f"hetero writes no script or manifest for {cls.name}; see its guide")

    def read_cluster(self, *, host: str | None = None, roles: Sequence[str] = ()) -> ClusterSpec:
        """Return the hosts of the job with the role of each group, and which of them this host is.

        Args:
            host: This host's name. Defaults to the description's ``current_host``. Without that key, it defaults to
                the first name of this machine that the description lists.
            roles: Overrides of the derived roles, each ``GROUP=data`` or ``GROUP=trainer``.

        Raises:
            ClusterError: If the description is missing, or if it is malformed or ambiguous.
            ConfigError: If ``roles`` are malformed.
        """
        found = self.describe()
        # A role from the user replaces the role from the platform. Both together would be an error.
        stated_groups = {text.rpartition("=")[0] for text in roles}
        platform_roles = [text for text in found.roles if text.rpartition("=")[0] not in stated_groups]
        return parse_cluster(
            found.document,
            source=found.source,
            current_host=host,
            own_names=found.own_names,
            roles=(*roles, *platform_roles),
        )

    def host_names(self) -> list[str]:
        """Return all hosts in natural order. Roles and the name of this host may be unknown.

        Raises:
            ClusterError: If the description is missing, or if its groups and hosts are malformed.
        """
        found = self.describe()
        return host_names(found.document, source=found.source)

    def _described(
        self, groups: Sequence[object], current_host: str, *, roles: Sequence[str] = ()
    ) -> ClusterDescription:
        """Return a description that was made from the environment.

        Args:
            groups: Results of `hetero.cluster.groups.group_document`.
            current_host: Name of this host.
            roles: See `ClusterDescription`.
        """
        document = {"instance_groups": groups, "current_host": current_host}
        return ClusterDescription(document=document, source=f"the {self.source} environment", roles=roles)

    def _number(
        self, variable: str, *, default: str = "", largest: int = MAX_HOSTS, expected: str = "a number", to_do: str = ""
    ) -> int:
        """Return the whole number in a variable.

        Args:
            variable: Name of the variable.
            default: Text that replaces an empty or missing value.
            largest: Largest number that is allowed.
            expected: What is expected, for the error.
            to_do: Advice for the error.

        Raises:
            ClusterError: If the value is not a number from 0 to ``largest``.
        """
        text = self.environ.get(variable) or default
        # `isdigit` alone accepts digits such as ², and `int` raises an error for a text of thousands of digits.
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(largest))
        if is_number and int(text) <= largest:
            return int(text)
        raise self._error(f"{variable} is {text!r:.40}" if text else f"{variable} is not set", expected, to_do)

    def _error(self, found: str, expected: str, to_do: str = "") -> ClusterError:
        """Return the error for an environment that does not describe a cluster.

        Args:
            found: What is wrong.
            expected: What is expected instead.
            to_do: Advice.
        """
        lines = ["the description of the cluster is wrong", f"in: the {self.source} environment", f"found: {found}"]
        lines += [f"expected: {expected}", to_do and f"to do: {to_do}"]
        return ClusterError("\n  ".join(line for line in lines if line))

    def job_id(self, cluster: ClusterSpec) -> str:
        """Return the id of the job, which is the same on all hosts. It is one plain word, because headers carry it.

        If neither the user (``HETERO_JOB_ID``) nor the platform names the job, the id is a digest of its trainer hosts.
        The digest leaves out the data hosts, because data hosts may be added later.
        """
        stated = self.environ.get("HETERO_JOB_ID") or self.job_name()
        if stated:
            return slug(stated)
        trainer_groups = [group for group in cluster.groups if group.role is Role.TRAINER]
        text = json.dumps([[group.name, group.instance_type, *group.hosts] for group in trainer_groups])
        return "cluster-" + hashlib.sha256(text.encode()).hexdigest()[:16]


class PlatformWrapper(Platform):
    """A platform that takes only the description of the cluster from somewhere else.

    Args:
        own_platform: The platform that runs this process.
        environ: Environment that replaces the environment of that platform. None keeps that environment.
    """

    def __init__(self, own_platform: Platform, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(own_platform.environ if environ is None else environ)
        self._own_platform = own_platform
        self.stripped = own_platform.stripped
        self.stop_signals = own_platform.stop_signals
        self.kill_after_s = own_platform.kill_after_s

    def is_here(self) -> bool:
        """Return True, because the user or the job has named the description."""
        return True

    @property
    def folders(self) -> Folders:
        """The folders of the platform that runs this process."""
        return self._own_platform.folders

    def job_name(self) -> str:
        """Return the job's name on the platform that runs this process."""
        return self._own_platform.job_name()

    def parameters(self) -> JobParameters | None:
        """Return the parameters of the platform that runs this process."""
        return self._own_platform.parameters()

    def num_gpus(self) -> int | None:
        """Return the number of accelerators that the platform of this process states."""
        return self._own_platform.num_gpus()

    def own_variables(self, cluster: ClusterSpec) -> dict[str, str]:
        """Return the variables of the platform that runs this process."""
        return self._own_platform.own_variables(cluster)
