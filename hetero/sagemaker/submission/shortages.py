"""Find in the service's responses which instances the service lacks for a job.

SageMaker reports two kinds of shortage. If the job exceeds the account's quota of an instance type, the call fails
(``ResourceLimitExceeded``). Waiting then helps only if other jobs use up the quota. If the service has too few
instances, the job fails minutes later, before it has begun. Its FailureReason contains ``CapacityError`` or
``InsufficientCapacity...``, and the job costs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero.sagemaker.request import TrainingRequest

__all__ = ["Shortage", "is_shortage", "shortage_in"]

_KIND = re.compile(r"\b(ResourceLimitExceeded|CapacityError|InsufficientCapacity\w*|InsufficientInstanceCapacity)\b")
_TYPE = re.compile(r"\bml\.[a-z0-9-]+\.[a-z0-9]+\b")
_QUOTA = re.compile(
    r"is (?P<limit>\d+) Instances, with current utilization of (?P<used>\d+) Instances "
    r"and a request delta of (?P<delta>\d+) Instances"
)
_OF_THE_SCRIPT = "AlgorithmError"
"""Prefix of the FailureReason of a job that began. The script wrote the rest, which may quote errors of any service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The instances that a job did not get."""

    kind: str
    """The service's name for the shortage, such as ``CapacityError`` or ``ResourceLimitExceeded``."""
    instance_types: tuple[str, ...]
    """The instance types that the service lacks. All types of the job if the service does not name them."""
    why: str
    is_final: bool
    """Whether waiting cannot help, because the job needs more than the account's quota."""

    def lines(self, request: TrainingRequest) -> list[str]:
        """Return one line per instance type, with the number that the job needs, the groups, and the reason."""
        found = []
        for kind in self.instance_types:
            groups = [group for group in request.groups if group.instance_type == kind]
            num_and_groups = f"{sum(group.count for group in groups)} for {', '.join(group.name for group in groups)}"
            found.append(f"{kind} ({num_and_groups}): {self.kind}: {self.why}")
        return found


def is_shortage(text: str) -> bool:
    """Return whether an error's text or a FailureReason describes a shortage."""
    return _KIND.search(text) is not None and not text.lstrip().startswith(_OF_THE_SCRIPT)


def shortage_in(text: str, request: TrainingRequest) -> Shortage | None:
    """Return the shortage that an error's text or a FailureReason describes, or None.

    Args:
        text: The service's text, which includes the error's code.
        request: The request of the job.
    """
    found = _KIND.search(text)
    # `is_shortage` also rejects a text of the job's own script, which may quote such an error.
    if found is None or not is_shortage(text):
        return None
    # The types of the request, each once. If the text names none of them, any type may be missing.
    requested_types = dict.fromkeys(group.instance_type for group in request.groups)
    named_types = tuple(kind for kind in requested_types if kind in _TYPE.findall(text))
    quota = _QUOTA.search(text)
    why, is_final = "the platform has no free instances", False
    if quota is not None:
        limit, used, delta = (int(quota[name]) for name in ("limit", "used", "delta"))
        # The job alone needs more than the quota, even if nothing else runs.
        is_final = delta > limit
        why = f"the account's quota is {limit}, {used} are in use and the job needs {delta}"
        why += ", so waiting does not help" if is_final else ""
    # The text states no numbers of a quota in the known form, so show it as it is.
    elif found[1] == "ResourceLimitExceeded":
        why = " ".join(text.split())[:300]
    return Shortage(kind=found[1], instance_types=named_types or tuple(requested_types), why=why, is_final=is_final)
