"""The role of each group: given by a flag, or derived from the names and instance types of the groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hetero.cluster.document import close, listing
from hetero.cluster.spec import Role
from hetero.errors import ClusterError, ConfigError

__all__ = ["assign_roles", "check_spot_groups", "has_accelerator", "several_trainers"]

_ACCELERATED = re.compile(
    r"(ml\.)?(p|g|gr|trn|inf|dl)[0-9][a-z0-9-]*\..+|local_gpu"  # AWS
    r"|(.+\+)?GPU:[1-9][0-9]*"  # what a host has
    r"|(a2|a3|a4|a4x|g2|g4)-.+"  # Google Cloud
    r"|Standard_N[CDV].+"  # Azure
)
_BY_NAME = (
    ("data", Role.DATA),
    ("cpu", Role.DATA),
    ("dnn", Role.TRAINER),
    ("train", Role.TRAINER),
    ("gpu", Role.TRAINER),
)


def has_accelerator(instance_type: str) -> bool:
    """Return whether an instance type has accelerators, by its family, or because it is ``local_gpu`` or ``GPU:8``."""
    return _ACCELERATED.fullmatch(instance_type) is not None


def assign_roles(groups: Sequence[tuple[str, str]], overrides: Sequence[str], source: str) -> list[Role]:
    """Return the role of every group.

    A single group trains, unless its flag says otherwise. With several groups, a group gets its role from its flag,
    else from its name, else from its instance type if that has accelerators. If none of these gives a role and a
    trainer group has accelerators, the group is a data group.

    Args:
        groups: Name and instance type of each group.
        overrides: Flags, each ``GROUP=data`` or ``GROUP=trainer``.
        source: Origin of the groups, for messages.

    Raises:
        ClusterError: If a role is unclear, an override names an unknown group, or no group trains.
        ConfigError: If an override is malformed.
    """
    names = [name for name, _ in groups]
    by_flag = _parse_overrides(overrides, names, source)
    if len(groups) == 1:
        # The only group trains whatever its name is, because a job without ranks does nothing.
        roles = {names[0]: by_flag.get(names[0], Role.TRAINER)}
    else:
        derived = {name: by_flag.get(name) or _by_name(name) or _by_accelerator(kind) for name, kind in groups}
        roles = {name: role for name, role in derived.items() if role is not None}
        # If a trainer group has accelerators, the groups without a role so far prepare data.
        if any(has_accelerator(kind) and roles.get(name) is Role.TRAINER for name, kind in groups):
            roles = dict.fromkeys(names, Role.DATA) | roles
    unclear = [name for name in names if name not in roles]
    if unclear:
        flags = " ".join(f"--role '{name}=data'" for name in unclear)
        raise ClusterError(
            f"cannot tell whether group {unclear[0]!r} preprocesses or trains\n  in: {source}\n"
            f"  found: {listing(f'{name} ({kind})' if kind else name for name, kind in groups)}\n"
            "  expected: names that start with data, cpu, dnn, train or gpu, or one group with accelerators\n"
            f"  to do: give {flags}, or the same with =trainer"
        )
    if Role.TRAINER not in roles.values():
        raise ClusterError(
            f"no group trains: {listing(names)} all have the role data\n  in: {source}\n"
            f"  to do: give --role '{names[0]}=trainer' for the group that trains"
        )
    return [roles[name] for name in names]


def check_spot_groups(spot_groups: Iterable[str], roles: Mapping[str, Role]) -> None:
    """Check that ``--spot`` names only data groups of the job.

    Args:
        spot_groups: Names of the groups on capacity that the platform may take back.
        roles: The role of each group of the job, by name.

    Raises:
        ConfigError: If a spot group trains, or is not a group of the job.
    """
    data = [name for name, role in roles.items() if role is Role.DATA]
    for name in spot_groups:
        if name in data:
            continue
        trains = "this group trains, and the job ends if the platform takes a trainer host back"
        raise ConfigError(
            f"--spot {name}: {trains if name in roles else 'the job has no such group'}\n"
            f"  expected: a group of data hosts; this job has {', '.join(data) or 'none'}"
        )


def several_trainers(groups: Sequence[tuple[str, str]], roles: Sequence[Role], overrides: Sequence[str]) -> str:
    """Return a warning if several groups all train and at least one does so without a flag, else an empty text.

    Args:
        groups: Name and instance type of each group.
        roles: Role of each group.
        overrides: Flags, each ``GROUP=data`` or ``GROUP=trainer``.
    """
    without_flag = [name for name, _ in groups if f"{name}=trainer" not in overrides]
    # This is only a warning, because groups of two instance types can train together.
    if len(groups) < 2 or Role.DATA in roles or not without_flag:
        return ""
    # Guess which group the user meant for data, for the advice.
    likely = next((name for name in without_flag if "data" in name.lower()), without_flag[-1])
    reasons = [f"{name} ({_reason(name, kind, overrides)})" for name, kind in groups]
    flags_to_train = " ".join(f"--role '{name}=trainer'" for name, _ in groups)
    return (
        f"all {len(groups)} groups train, and no group preprocesses: {listing(reasons)}; if {likely!r} should "
        f"preprocess, give --role '{likely}=data'; if all should train, give {flags_to_train}"
    )


def _reason(name: str, instance_type: str, overrides: Sequence[str]) -> str:
    if f"{name}=trainer" in overrides:
        return "by its flag"
    return "by its name" if _by_name(name) else f"{instance_type} has accelerators"


def _by_name(name: str) -> Role | None:
    return next((role for prefix, role in _BY_NAME if name.lower().startswith(prefix)), None)


def _by_accelerator(instance_type: str) -> Role | None:
    return Role.TRAINER if has_accelerator(instance_type) else None


def _parse_overrides(overrides: Sequence[str], names: Sequence[str], source: str) -> dict[str, Role]:
    """Return the role of each group that a flag names.

    Raises:
        ClusterError: If a flag names an unknown group.
        ConfigError: If a flag is malformed, or contradicts another.
    """
    roles: dict[str, Role] = {}
    for text in overrides:
        name, _, value = text.rpartition("=")
        if not name or value not in {role.value for role in Role}:
            raise ConfigError(f"--role {text!r}: expected GROUP=data or GROUP=trainer")
        if name not in names:
            guess = close(name, names)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise ClusterError(
                f"--role {text!r}: no group has that name{hint}\n  in: {source}\n  groups: {listing(names)}"
            )
        if roles.setdefault(name, Role(value)) is not Role(value):
            raise ConfigError(f"--role gives group {name!r} both roles; expected one")
    return roles
