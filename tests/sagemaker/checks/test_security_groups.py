"""Security groups whose rules can be seen, by a client whose answers are checked against the service's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.sagemaker import TrainingRequest, check
from hetero.sagemaker.checks.security_groups import seen_security_groups
from tests.support.sagemaker.estimators import clean, pytorch

boto3 = pytest.importorskip("boto3")
stub = pytest.importorskip("botocore.stub")
IDS = ["sg-1", "sg-2"]
ITSELF = {"UserIdGroupPairs": [{"GroupId": "sg-1"}]}
ANYWHERE = {"IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
ALL = {"IpProtocol": "-1"}


@pytest.fixture
def stubber() -> Any:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    with stub.Stubber(client) as stubber:
        yield stubber


def tcp(low: int = 0, high: int = 65535) -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": low, "ToPort": high}


def answer(*rules_in: dict[str, Any], rules_out: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return an answer with the rules in the second of two groups."""
    egress = [ALL | ANYWHERE] if rules_out is None else rules_out
    second = {"GroupId": "sg-2", "IpPermissions": list(rules_in), "IpPermissionsEgress": egress}
    return {"SecurityGroups": [{"GroupId": "sg-1", "IpPermissions": [], "IpPermissionsEgress": []}, second]}


def severities(stubber: Any) -> list[bool | None]:
    document = clean() | {"VpcConfig": {"SecurityGroupIds": IDS, "Subnets": ["subnet-1"]}}
    return [problem.is_error for problem in seen_security_groups(TrainingRequest.parse(document), stubber.client)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (answer(ALL | ITSELF), []),
        (answer(tcp() | ITSELF), []),
        (answer(tcp(1024) | ITSELF), []),
        (answer(ALL | ANYWHERE), []),
        (answer(ALL | ITSELF, rules_out=[tcp() | {"UserIdGroupPairs": [{"GroupId": "sg-2"}]}]), []),
        (answer(), [True]),
        (answer(tcp(443, 443) | ANYWHERE), [True]),
        (answer(ALL | {"UserIdGroupPairs": [{"GroupId": "sg-3"}]}), [True]),
        (answer({"IpProtocol": "udp", "FromPort": 0, "ToPort": 65535} | ITSELF), [True]),
        (answer(ALL | ITSELF, rules_out=[]), [True]),
        (answer(ALL | {"IpRanges": [{"CidrIp": "10.0.0.0/16"}]}), [None]),
        (answer(ALL | ITSELF, rules_out=[ALL | {"PrefixListIds": [{"PrefixListId": "pl-1"}]}]), [None]),
    ],
)
def test_rules_decide_whether_hosts_reach_each_other(
    rules: dict[str, Any], expected: list[bool | None], stubber: Any
) -> None:
    stubber.add_response("describe_security_groups", rules, {"GroupIds": IDS})
    assert severities(stubber) == expected


def test_rules_that_cannot_be_read_stay_a_warning(stubber: Any) -> None:
    stubber.add_client_error("describe_security_groups", "UnauthorizedOperation", "not authorized")
    assert severities(stubber) == [None]


def test_job_without_a_vpc_asks_nobody(stubber: Any) -> None:
    assert list(seen_security_groups(TrainingRequest.parse(clean()), stubber.client)) == []


def test_check_with_a_client_says_what_it_has_seen(source_dir: Path, stubber: Any) -> None:
    pytest.importorskip("sagemaker.estimator", reason="this is about version 2 of the SDK")
    estimator = pytorch(source_dir, subnets=["subnet-1"], security_group_ids=IDS)
    assert [(finding.number, finding.severity) for finding in check(estimator)] == [("SM-13", "warning")]
    stubber.add_response("describe_security_groups", answer(ALL | ITSELF))
    assert check(estimator, ec2=stubber.client) == []
    stubber.add_response("describe_security_groups", answer(ALL | ITSELF, rules_out=[]))
    (finding,) = check(estimator, ec2=stubber.client)
    assert (finding.number, finding.severity) == ("SM-13", "error")
    assert "do not let the hosts' TCP out" in finding.found
