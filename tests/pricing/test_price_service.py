"""Prices from AWS's price list service, by a client whose answers are checked against the service's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero import cli
from hetero.errors import ConfigError, ExitCode
from hetero.pricing.price_service import fetch_prices, is_ours
from tests.support.sagemaker.guards import hide_account

boto3 = pytest.importorskip("boto3")
stub = pytest.importorskip("botocore.stub")
OFFER: dict[str, Any] = json.loads(Path(__file__).with_name("offer.json").read_text(encoding="utf-8"))
REQUEST = {
    "ServiceCode": "AmazonSageMaker",
    "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": "us-east-1"}],
    "FormatVersion": "aws_v1",
    "MaxResults": 100,
}


def items() -> list[str]:
    """Return the products of the offer file as the service gives them, one text each."""
    head = {"serviceCode": "AmazonSageMaker", "version": OFFER["version"], "publicationDate": OFFER["publicationDate"]}
    terms = OFFER["terms"]["OnDemand"]
    return [
        json.dumps({"product": product, "terms": {"OnDemand": terms[sku]}, **head})
        for sku, product in OFFER["products"].items()
    ]


@pytest.fixture
def client() -> Any:
    return boto3.client("pricing", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")


def test_all_pages_are_read(client: Any) -> None:
    with stub.Stubber(client) as stubber:
        stubber.add_response("get_products", {"PriceList": items()[:4], "NextToken": "more"}, REQUEST)
        stubber.add_response("get_products", {"PriceList": items()[4:]}, {**REQUEST, "NextToken": "more"})
        found = fetch_prices("us-east-1", client)
        stubber.assert_no_pending_responses()
    assert found.hourly_usd == {"ml.c5.9xlarge": 1.836, "ml.g5.xlarge": 1.408, "ml.p4d.24xlarge": 25.251}
    assert (found.region, found.as_of) == ("us-east-1", "2026-11-01")
    assert is_ours(found.source)


def test_refusal_says_what_to_do_instead(client: Any) -> None:
    with stub.Stubber(client) as stubber:
        stubber.add_client_error("get_products", "AccessDeniedException", "not authorized to perform pricing")
        with pytest.raises(ConfigError, match="not authorized to perform pricing") as caught:
            fetch_prices("us-east-1", client)
    assert "pricing:GetProducts" in str(caught.value)


def test_region_without_prices_is_refused(client: Any) -> None:
    with stub.Stubber(client) as stubber:
        stubber.add_response("get_products", {"PriceList": []})
        with pytest.raises(ConfigError, match="no prices of training in 'mars-1'"):
            fetch_prices("mars-1", client)


def test_service_that_never_ends_is_left(client: Any) -> None:
    with stub.Stubber(client) as stubber:
        for _ in range(2):
            stubber.add_response("get_products", {"PriceList": [], "NextToken": "more"})
        with pytest.raises(ConfigError, match="The same next token"):
            fetch_prices("us-east-1", client)


def test_command_writes_the_file_that_other_commands_take(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boto3, "client", lambda *_, **__: client)
    path = tmp_path / "prices.json"
    with stub.Stubber(client) as stubber:
        stubber.add_response("get_products", {"PriceList": items()}, REQUEST)
        assert cli.main(["prices", "refresh", "--output", str(path)]) == ExitCode.OK
    assert "3 prices of us-east-1" in capsys.readouterr().out
    assert cli.main(["prices", "show", "ml.p4d.24xlarge", "--price-file", str(path)]) == ExitCode.OK
    assert "25.251 USD/hour in us-east-1" in capsys.readouterr().out


def test_command_without_an_account_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_account(monkeypatch, tmp_path)
    assert cli.main(["prices", "refresh", "--output", str(tmp_path / "prices.json")]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "AWS's price list cannot be read: Unable to locate credentials" in error
    assert "pricing:GetProducts" in error
