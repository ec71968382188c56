"""What a user asks `hetero render` for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hetero.cluster.groups import GROUPS_VARIABLE, StatedGroup
from hetero.cluster.roles import assign_roles
from hetero.cluster.spec import Role
from hetero.errors import ConfigError
from hetero.system.scripts import script_words

if TYPE_CHECKING:
    from hetero.pricing import InstanceTypeInfo

__all__ = ["GRACE_S", "PORT", "RenderRequest", "Resources", "machine_of", "make_request", "resources_of"]

GRACE_S = 120
"""Seconds between the request to stop and the kill that a rendered job asks for. Ranks get half of this time."""
PORT = 17170
"""Default of ``--port``."""
_DNS_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_MAX_POD_NAME = 63


class Resources(NamedTuple):
    """What each host of a group has, as ``CPU:16`` and ``GPU:8`` state it."""

    cpus: int
    """0 if the group states GPUs or the name of a type."""
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderRequest:
    """A job to render."""

    name: str
    groups: tuple[StatedGroup, ...]
    roles: tuple[Role, ...]
    """Role of each group."""
    script: str
    is_module: bool = False
    script_args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Options of ``hetero launch``."""
    image: str = ""
    """Container image with the script and hetero. Empty on Slurm."""
    hours: float | None = None
    """Time limit. None for the platform's default."""
    spot: tuple[str, ...] = ()
    """Names of the groups on capacity that the platform may take back."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings that only one platform has, by the names of the setting and the group: ``{"partition": {"data":
    "cpu"}}``."""
    separate_steps: bool = False
    """Whether each component of a Slurm job has a separate ``srun``. Sites with ``disable_hetero_steps`` need it."""

    @property
    def command(self) -> list[str]:
        """The command of each host."""
        words = script_words(self.script, is_module=self.is_module)
        return ["hetero", "launch", *self.flags, *words, "--", *self.script_args]

    @property
    def shell_command(self) -> str:
        """The command of each host, quoted for a shell."""
        return shlex.join(self.command)

    @property
    def groups_text(self) -> str:
        """Value of ``HETERO_GROUPS``."""
        return " ".join(group.text for group in self.groups)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every host needs."""
        return {GROUPS_VARIABLE: self.groups_text, "PYTHONUNBUFFERED": "1"}

    def members(self, role: Role) -> list[StatedGroup]:
        """Return the groups of a role."""
        return [group for group, own in zip(self.groups, self.roles, strict=True) if own is role]

    def is_spot(self, group: StatedGroup) -> bool:
        """Return whether a group is on capacity that the platform may take back."""
        return group.name in self.spot

    def setting(self, name: str, group: StatedGroup | None = None) -> str:
        """Return the setting of a group. If the group has none, return that of the whole job, or an empty text."""
        by_group = self.settings.get(name, {})
        # A setting of the whole job has an empty group name.
        of_job = by_group.get("", "")
        return of_job if group is None else by_group.get(group.name, of_job)

    def check_dns_names(self, what: str) -> None:
        """Raise `ConfigError` if the names of the job and its groups cannot be names of pods and services.

        JobSet and Kubeflow reject such names too, but only when the job is submitted.
        """
        for name in (self.name, *(group.name for group in self.groups)):
            if _DNS_NAME.fullmatch(name) is None:
                raise ConfigError(
                    f"{name!r:.80} cannot be the name of {what}; expected at most 40 lower-case letters, digits and -, "
                    "with a letter first"
                )
        for group in self.groups:
            # The longest name of a pod of the group: the index of its job, which is 0, the index of the pod, and five
            # random letters, which Kubernetes adds.
            pod = f"{self.name}-{group.name}-0-{group.count - 1}-abcde"
            if len(pod) > _MAX_POD_NAME:
                raise ConfigError(
                    f"pod {pod} has a name of {len(pod)} characters; expected at most {_MAX_POD_NAME}\n"
                    f"  to do: give a shorter --name, or a shorter name to the group {group.name}"
                )

    def check_image(self) -> None:
        """Raise `ConfigError` if the image is missing."""
        if not self.image:
            raise ConfigError("--image IMAGE: missing, expected the container image with hetero and the script")


def make_request(groups: Sequence[StatedGroup], roles: Sequence[str], **values: object) -> RenderRequest:
    """Return a request with the trainers first, because their first host decides how a job ends.

    Args:
        groups: The groups.
        roles: Overrides of the derived roles, each ``GROUP=data`` or ``GROUP=trainer``.
        values: Other values of the request.

    Raises:
        ConfigError: If groups are missing, or two have the same name.
        ClusterError: If a role is unclear.
    """
    if not groups:
        raise ConfigError("--group NAME=TYPE:COUNT: missing, for example --group trainer=GPU:8:1 --group data=CPU:32:2")
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--group: {repeated!r:.80} is given twice, expected distinct names")
    found = assign_roles([(group.name, group.instance_type) for group in groups], roles, "--group")
    # sorted() is stable, so groups of one role keep the order of the user.
    ordered = sorted(zip(groups, found, strict=True), key=lambda pair: pair[1] is not Role.TRAINER)
    return RenderRequest(
        groups=tuple(group for group, _ in ordered),
        roles=tuple(role for _, role in ordered),
        **values,  # type: ignore[arg-type]
    )


def resources_of(group: StatedGroup) -> Resources:
    """Return what each host of a group has, as ``CPU:16`` or ``GPU:8`` states it. Zeros for other types."""
    # Import this here, because ranks import this module, and the import takes 0.1 s.
    from hetero.pricing import stated_resources

    stated = stated_resources(group.instance_type)
    return Resources(cpus=0, gpus=0) if stated is None else Resources(stated.vcpus or 0, stated.num_accelerators or 0)


def machine_of(group: StatedGroup) -> InstanceTypeInfo | None:
    """Return the facts of a group's machine type of Google Cloud or Azure, or None if it is not known.

    Types of SageMaker are left out, because no other platform has them.
    """
    # Import this here, because ranks import this module, and the import takes 0.1 s.
    from hetero.pricing import Catalogue, stated_resources

    # ``CPU:16`` and ``GPU:8`` state resources instead of a type of a cloud.
    is_of_other_kind = stated_resources(group.instance_type) is not None or group.instance_type.startswith("ml.")
    return None if is_of_other_kind else Catalogue.load().find(group.instance_type)
