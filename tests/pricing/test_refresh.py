"""AWS's prices: which products they are, and a price file that keeps what its user wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.pricing import Catalogue
from hetero.pricing.price_service import PriceList, hourly_usd, is_ours, refresh_file, trained_type

PRICES = {"ml.c5.9xlarge": 1.836, "ml.g5.xlarge": 1.408, "ml.p4d.24xlarge": 25.251}


def new_prices(**hourly: float) -> PriceList:
    source = "AWS price list of AmazonSageMaker, on demand, version 20261101000000"
    return PriceList(region="us-east-1", as_of="2026-11-01", source=source, hourly_usd=hourly or PRICES)


def product(usage: Any, region: Any = "us-east-1") -> dict[str, Any]:
    return {"attributes": {"usagetype": usage, "regionCode": region}}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ("USE1-Train:ml.c5.xlarge", "ml.c5.xlarge"),
        ("Train:ml.c5.xlarge", "ml.c5.xlarge"),
        ("APN1-Train:ml.p6-b200.48xlarge", "ml.p6-b200.48xlarge"),
        ("USE1-SpotTrain:ml.c5.xlarge", None),
        ("USE1-WarmPool-Train:ml.c5.xlarge", None),
        ("USE1-Host:ml.c5.xlarge", None),
        ("USE1-Train:VolumeUsage.gp2", None),
        (None, None),
        (["USE1-Train:ml.c5.xlarge"], None),
    ],
)
def test_hours_of_training_are_told_from_others(usage: Any, expected: str | None) -> None:
    assert trained_type(product(usage)) == (None if expected is None else (expected, "us-east-1"))


@pytest.mark.parametrize("item", [None, [], {}, {"attributes": []}, product("USE1-Train:ml.c5.xlarge", None)])
def test_product_of_another_shape_is_none(item: Any) -> None:
    assert trained_type(item) is None


def offers(**dimension: Any) -> dict[str, Any]:
    whole = {"unit": "Hrs", "beginRange": "0", "pricePerUnit": {"USD": "1.5"}} | dimension
    return {"sku.term": {"priceDimensions": {"sku.term.rate": whole}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (offers(), 1.5),
        (offers(pricePerUnit={"USD": "0.0000000000"}), None),
        (offers(pricePerUnit={"CNY": "1.5"}), None),
        (offers(pricePerUnit={"USD": "1e400"}), None),
        (offers(pricePerUnit={"USD": "nan"}), None),
        (offers(pricePerUnit={"USD": "-1"}), None),
        (offers(pricePerUnit={"USD": "1000"}), None),
        (offers(pricePerUnit=None), None),
        (offers(unit="GB-Mo"), None),
        ({**offers(), "b": offers(pricePerUnit={"USD": "2"})["sku.term"]}, 2.0),
        (None, None),
        ({"a": {"priceDimensions": [1]}, "b": 3}, None),
    ],
)
def test_price_is_per_hour_in_usd_and_within_bounds(value: Any, expected: float | None) -> None:
    assert hourly_usd(value) == expected


def test_new_file_is_a_price_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    text = refresh_file(path, new_prices())
    assert "3 prices of us-east-1 as of 2026-11-01, 3 new, 0 changed, 0 overrides kept" in text
    price = Catalogue.load(price_file=path, region="us-east-1").get("ml.g5.xlarge").price
    assert price is not None
    assert (price.hourly_usd, price.region, price.as_of) == (1.408, "us-east-1", "2026-11-01")
    assert is_ours(price.source)


def test_overrides_survive_every_refresh_and_beat_it(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    refresh_file(path, new_prices(**{"ml.c5.9xlarge": 1.0, "ml.old.xlarge": 3.0}))
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"overrides": {"ml.c5.9xlarge": 1.5, "ml.own.xlarge": 0.5}}))
    for _ in range(2):
        text = refresh_file(path, new_prices())
    assert "0 new, 0 changed, 2 overrides kept" in text
    catalogue = Catalogue.load(price_file=path)
    found = {name: catalogue.get(name).hourly_usd for name in ("ml.c5.9xlarge", "ml.own.xlarge", "ml.g5.xlarge")}
    assert found == {"ml.c5.9xlarge": 1.5, "ml.own.xlarge": 0.5, "ml.g5.xlarge": 1.408}
    assert catalogue.find("ml.old.xlarge") is None  # AWS states it no longer
    price = catalogue.get("ml.c5.9xlarge").price
    assert price is not None
    assert price.source == f"{path}: overrides"


def test_file_that_the_user_wrote_becomes_overrides(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text('{"source": "our contract", "hourly_usd": {"ml.c5.9xlarge": 1.1}}')
    assert "1 overrides kept" in refresh_file(path, new_prices())
    catalogue = Catalogue.load(price_file=path)
    assert catalogue.get("ml.c5.9xlarge").hourly_usd == 1.1
    assert catalogue.get("ml.g5.xlarge").hourly_usd == 1.408


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("prices.yaml", "hourly_usd: {}", "expected a name that ends in .json"),
        (
            "prices.json",
            '{"region": "eu-west-1", "hourly_usd": {}}',
            "has prices of eu-west-1, the new ones are of us-east-1",
        ),
        ("prices.json", '{"hourly_usd": {"ml.x": -1}}', "found -1"),
        ("prices.json", '{"hourly_usd": {}, "overrides": [1]}', "overrides: expected an object"),
        ("prices.json", '{"hourly_usd": {}, "overrides": {"ml.x": "1"}}', "overrides.ml.x: found '1'"),
        (
            "prices.json",
            '{"hourly_usd": {}, "overrides": {"a b": 1}}',
            "overrides: found 'a b', expected an instance type",
        ),
        ("prices.json", '{"hourly_usd": {"ml', "not valid JSON"),
    ],
)
def test_file_that_cannot_take_them_stays_as_it_is(name: str, content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        refresh_file(path, new_prices())
    assert words in str(caught.value)
    assert path.read_text() == content


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write .*No such file"):
        refresh_file(tmp_path / "none" / "prices.json", new_prices())


def test_more_prices_than_a_price_file_holds_are_refused(tmp_path: Path) -> None:
    many = {f"ml.c5.{index}xlarge": 1.0 for index in range(50_000)}
    with pytest.raises(ConfigError, match="at most 1048576 bytes"):
        refresh_file(tmp_path / "prices.json", new_prices(**many))
    assert list(tmp_path.iterdir()) == []
