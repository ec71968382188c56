"""Check whether security groups let the hosts of a job reach each other in the user's VPC."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero.sagemaker.checks.facts import member
from hetero.sagemaker.checks.rules import Problem, security_groups
from hetero.sagemaker.request import TrainingRequest

__all__ = ["seen_security_groups"]

_LOW_PORT, _HIGH_PORT = 1024, 65535
"""Ports that a rule must allow. The user chooses the launchers' port, and endpoints and ranks use any free port."""
_ANYWHERE = "0.0.0.0/0"


def seen_security_groups(request: TrainingRequest, ec2: Any) -> Iterator[Problem]:
    """Yield a problem unless the rules of the security groups let the hosts reach each other.

    A request names the security groups. This function reads their rules from AWS. If a rule allows only certain
    addresses, the hosts may or may not have them. The problem is then a warning instead of an error.

    Args:
        request: Request for a job, whose hosts may be in a VPC.
        ec2: boto3's client for ``ec2``, in the region of the job.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    # Begin with the warning for rules that are not known. A job without a VPC has no warning.
    warning = next(security_groups(request), None)
    if warning is None:
        return
    names = [str(name) for name in member(request, "VpcConfig.SecurityGroupIds", list, [])]
    try:
        found = ec2.describe_security_groups(GroupIds=names)["SecurityGroups"]
    except (BotoCoreError, ClientError) as error:
        yield Problem(f"{warning.found}. Their rules cannot be read: {str(error)[:200]}", warning.fix)
        return
    # Traffic between the hosts must be allowed in both directions.
    is_allowed = {
        "in": _allows_hosts(found, "IpPermissions", names),
        "out": _allows_hosts(found, "IpPermissionsEgress", names),
    }
    if forbidden := [direction for direction, allowed in is_allowed.items() if allowed is False]:
        yield Problem(
            f"security groups {', '.join(map(repr, names))} do not let the hosts' TCP {' and '.join(forbidden)}. The "
            "hosts of this job cannot reach each other",
            warning.fix,
            is_error=True,
        )
    elif None in is_allowed.values():
        yield warning


def _allows_hosts(groups: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> bool | None:
    """Return whether rules allow TCP between members of the groups. None if this depends on the hosts' addresses.

    Args:
        groups: Descriptions of the security groups, as EC2 gives them.
        key: Key of the rules for one direction.
        names: Ids of the security groups.
    """
    depends_on_addresses = False
    rules = [rule for group in groups for rule in group.get(key, ())]
    # Endpoints and ranks use any free port, so a rule for only some ports does not count.
    for rule in filter(_is_for_all_ports, rules):
        if any(pair.get("GroupId") in names for pair in rule.get("UserIdGroupPairs", ())):
            return True
        ranges = [item.get("CidrIp") for item in rule.get("IpRanges", ())]
        if _ANYWHERE in ranges:
            return True
        if ranges or rule.get("PrefixListIds"):
            depends_on_addresses = True
    return None if depends_on_addresses else False


def _is_for_all_ports(rule: Mapping[str, Any]) -> bool:
    """Return whether a rule holds for all TCP ports that a job may use."""
    # In EC2's API, -1 means all protocols. A rule for all protocols states no ports.
    if rule.get("IpProtocol") == "-1":
        return True
    return (
        rule.get("IpProtocol") == "tcp"
        and rule.get("FromPort", 0) <= _LOW_PORT
        and rule.get("ToPort", _HIGH_PORT) >= _HIGH_PORT
    )
