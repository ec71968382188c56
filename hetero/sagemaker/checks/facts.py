"""Facts derived from a request: the roles, hardware and storage of its groups, and values that look like secrets."""

from __future__ import annotations

import functools
import re
from typing import TypeVar

from hetero.cluster import Role
from hetero.cluster.roles import assign_roles
from hetero.errors import HeteroError
from hetero.pricing import Catalogue
from hetero.sagemaker.limits import values_at
from hetero.sagemaker.request import RequestGroup, TrainingRequest

__all__ = [
    "assigned_roles",
    "hardware",
    "image_hardware",
    "is_secret",
    "member",
    "roles_of",
    "sizes_if_not_among",
    "storage_gb",
]

_PASSWORDS = {"passphrase", "passwd", "password"}
_SECRET_WORDS = {"apikey", "credential", "credentials", "secret", "token"}
_SECRET_ENDS = (("access", "key"), ("api", "key"), ("auth", "key"), ("private", "key"), ("secret", "key"))
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,}")
"""Matches hetero's own tokens, but not the path of a token file."""
_SECRET_VALUE = re.compile(r"[A-Za-z0-9+/=_.~-]{16,}")

_T = TypeVar("_T")
_U = TypeVar("_U")


def assigned_roles(request: TrainingRequest) -> dict[str, Role]:
    """Return the role that the launcher will assign to each group, by group name.

    Raises:
        ClusterError: If a role is unclear, or no group trains.
        ConfigError: If the hyperparameter ``hetero_roles`` is malformed.
    """
    # The hyperparameter is a JSON list, or texts with commas between them.
    stated = request.parameter("hetero_roles")
    overrides = [str(item) for item in stated] if isinstance(stated, list) else str(stated or "").split(",")
    overrides = [text for text in overrides if text]
    groups = [(group.name, group.instance_type) for group in request.groups]
    return dict(zip((name for name, _ in groups), assign_roles(groups, overrides, source="request"), strict=True))


def roles_of(request: TrainingRequest) -> dict[str, Role]:
    """Return the role of each group, by group name. Empty if a role is unclear, which `unclear_roles` reports."""
    try:
        return assigned_roles(request)
    except HeteroError:
        return {}


def image_hardware(image: str) -> str | None:
    """Return the hardware that an image's name states: ``neuron`` (Trainium), ``gpu`` or ``cpu``, or else None."""
    words = set(re.split(r"[^a-z0-9]+", image.rpartition("/")[2].lower()))
    if any(word.startswith("neuron") for word in words):
        return "neuron"
    # The tags of AWS's images name CUDA, for example cu124.
    if "gpu" in words or any(re.fullmatch(r"cu(da)?[0-9]{2,3}", word) for word in words):
        return "gpu"
    return "cpu" if "cpu" in words else None


def hardware(instance_type: str) -> str:
    """Return the kind of image that a type needs: ``neuron``, ``gpu`` or ``cpu``. ``cpu`` types run all images."""
    family = instance_type.removeprefix("ml.").partition(".")[0]
    if family.startswith(("trn", "inf")):
        return "neuron"
    return "gpu" if re.match(r"(p|g|gr)[0-9]", family) else "cpu"


def storage_gb(group: RequestGroup) -> int | None:
    """Return the local storage of a group's type in GB: 0 if the type has only EBS, None if the type is unknown."""
    info = _catalogue().find(group.instance_type)
    return info.instance_storage_gb if info else None


def sizes_if_not_among(instance_type: str) -> list[str]:
    """Return the known types that a user may have meant by an unknown type: those of the same family.

    Empty if the type itself is known, or if no type of its family is known.
    """
    family, dot, _ = instance_type.rpartition(".")
    # Types of other clouds lack a dot.
    if not dot:
        return []
    names = (info.instance_type for info in _catalogue().types())
    sizes = [name for name in names if name.rpartition(".")[0] == family]
    return [] if instance_type in sizes else sizes


@functools.cache
def _catalogue() -> Catalogue:
    return Catalogue.load()


def member(request: TrainingRequest, path: str, kind: type[_T], default: _U) -> _T | _U:
    """Return the member of the request at a path, or the default if the member is missing or has another type."""
    return next((value for _, value in values_at(request.document, path) if isinstance(value, kind)), default)


def is_secret(name: str, value: str) -> bool:
    """Return whether a value looks like a secret.

    Usually both the name and the value must look like a secret. Therefore ``max_tokens``, a path and ``<pad>`` are not
    secrets. If the name is a usual name of a password or the name of hetero's own token, every text except a path is a
    secret, because people choose passwords freely. In ``hetero_token_file``, a token instead of a path is a secret too.
    An AWS access key ID is always a secret.
    """
    # SDK 2 puts JSON quotes around hyperparameters.
    text = value.strip('"')
    if re.search(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b", text):
        return True
    if name.lower() == "hetero_token_file" and _TOKEN.fullmatch(text):
        return True
    # Everyone may see the path or the URI of a secret.
    if not text or text.startswith(("/", "s3:", "arn:", "./", "file:")):
        return False
    words = tuple(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)
    last_word = words[-1] if words else ""
    if name.lower() == "hetero_token" or last_word in _PASSWORDS:
        return True
    is_name_of_secret = last_word in _SECRET_WORDS or words[-2:] in _SECRET_ENDS
    return is_name_of_secret and _SECRET_VALUE.fullmatch(text) is not None
