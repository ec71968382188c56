"""Current prices from AWS's price list service, which needs an account and boto3.

Source of the format:
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/reading-service-price-list-file-for-services.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.documents.files import MAX_BYTES, write_text
from hetero.errors import ConfigError
from hetero.pricing.catalog import MAX_HOURLY_USD, parse_prices, read_price_file

__all__ = ["PriceList", "fetch_prices", "hourly_usd", "is_ours", "refresh_file", "trained_type"]

_SERVICE_CODE = "AmazonSageMaker"
_SOURCE = f"AWS price list of {_SERVICE_CODE}, on demand, version"
_TRAINING = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9]+)")
"""Matches usage types of training, such as ``EUW1-Train:ml.c5.xlarge``, but not those of warm pools or endpoints."""
_SERVICE_REGION = "us-east-1"
"""Region of the service, which returns the prices of all regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices of one region."""

    region: str
    as_of: str
    """ISO date of AWS's publication."""
    source: str
    hourly_usd: Mapping[str, float]
    """Instance type -> USD per hour, in (0, 1000)."""


def fetch_prices(region: str, client: Any = None) -> PriceList:
    """Return the hourly on-demand price of training on each instance type, as AWS states it.

    The function makes about a hundred calls and blocks for some seconds.

    Args:
        region: Region of the prices, such as ``eu-west-1``.
        client: boto3's client for ``pricing``. None makes one with the credentials of the environment.

    Raises:
        ConfigError: If boto3 is not installed, AWS cannot be reached or rejects a call, or AWS states no prices.
    """
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:
        raise ConfigError("boto3 is not installed; pip install boto3") from None
    prices: dict[str, float] = {}
    newest: dict[str, Any] = {}
    try:
        if client is None:
            import boto3

            client = boto3.client("pricing", region_name=_SERVICE_REGION)
        for product in _products(client, region):
            type_and_region = trained_type(product.get("product"))
            usd = hourly_usd((product.get("terms") or {}).get("OnDemand"))
            # Skip a product that is not an hour of training, or that lacks a price.
            if type_and_region is None or usd is None:
                continue
            instance_type, product_region = type_and_region
            if product_region == region:
                # A type may have several offers. The highest price is on the safe side.
                prices[instance_type] = max(usd, prices.get(instance_type, 0.0))
                newest = max(newest, product, key=lambda item: str(item.get("publicationDate", "")))
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(
            f"AWS's price list cannot be read: {str(error)[:300]}\n"
            "  to do: use credentials that may call pricing:GetProducts, or write a price file (docs/prices.md)"
        ) from error
    if not prices:
        raise ConfigError(f"AWS lists no prices of training in {region!r}; expected a region such as eu-west-1")
    # AWS states the version and the date of its list with each product.
    version, date = (str(newest.get(name, ""))[:40] for name in ("version", "publicationDate"))
    ordered = {name: prices[name] for name in sorted(prices)}
    return PriceList(region=region, as_of=date[:10], source=f"{_SOURCE} {version}", hourly_usd=ordered)


def _products(client: Any, region: str) -> Iterator[dict[str, Any]]:
    """Yield the products of AWS's price list for a region."""
    # The paginator raises if AWS returns the same page token again. So this loop ends.
    pages = client.get_paginator("get_products").paginate(
        ServiceCode=_SERVICE_CODE,
        Filters=[{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        FormatVersion="aws_v1",
        PaginationConfig={"PageSize": 100},
    )
    for page in pages:
        for text in page.get("PriceList", []):
            product = json.loads(text)
            if isinstance(product, dict):
                yield product


def trained_type(product: Any) -> tuple[str, str] | None:
    """Return the instance type and region of a product that is an hour of training. None for other products.

    Any part of the product may have an unexpected type, because the product comes from AWS.
    """
    attributes = product.get("attributes") if isinstance(product, Mapping) else None
    if not isinstance(attributes, Mapping):
        return None
    usage = _TRAINING.fullmatch(str(attributes.get("usagetype")))
    region = attributes.get("regionCode")
    return (usage[1], region) if usage and isinstance(region, str) else None


def hourly_usd(offers: Any) -> float | None:
    """Return the highest hourly price in USD in the offers for a product, or None if they state none."""
    # An offer is {"priceDimensions": {ID: {"unit": "Hrs", "pricePerUnit": {"USD": "1.2"}}}}. It has a dimension for
    # each unit, and a dimension has a price in each currency.
    dimensions = [dimension for offer in _values(offers) for dimension in _values(offer.get("priceDimensions"))]
    by_currency = [each.get("pricePerUnit") for each in dimensions if each.get("unit") in ("Hrs", "Hours")]
    prices = [_number(each.get("USD")) for each in by_currency if isinstance(each, Mapping)]
    return max((price for price in prices if price is not None and 0 < price < MAX_HOURLY_USD), default=None)


def is_ours(source: object) -> bool:
    """Return whether prices with this source come from AWS's list, and not from the user."""
    return isinstance(source, str) and source.startswith(_SOURCE)


def _values(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects in an object of AWS's list. Other values, and other documents, are ignored."""
    return [item for item in value.values() if isinstance(item, Mapping)] if isinstance(value, Mapping) else []


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def refresh_file(path: Path, prices: PriceList) -> str:
    """Write a price list into a price file as ``hourly_usd``.

    The file's ``overrides`` stay and still take precedence. If the prices in the file do not come from AWS's list, the
    user wrote them, and they all become overrides.

    Args:
        path: Price file, whose name ends in ``.json``. The function creates the file if it does not exist. It replaces
            the file as a whole or leaves it unchanged.
        prices: Prices from AWS.

    Returns:
        A text that describes the changes.

    Raises:
        ConfigError: If the existing file is not a price file or is for another region, or the file cannot be written.
    """
    if path.suffix != ".json":
        raise ConfigError(f"the price file is {path}; expected a name that ends in .json")
    # Split the file's prices into AWS's prices and the user's prices.
    old: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    if path.exists():
        content: Any = read_price_file(path)
        parse_prices(content, where=str(path), region=None)
        if content.get("region") not in (None, prices.region):
            raise ConfigError(
                f"{path} has prices of {content['region']}, the new ones are of {prices.region}; give another --output"
            )
        # Prices that the user wrote must survive the first refresh.
        if is_ours(content.get("source")):
            old = content["hourly_usd"]
        else:
            overrides = content["hourly_usd"]
        overrides = {**overrides, **(content.get("overrides") or {})}
    # Check the new content before it replaces the old.
    document: dict[str, Any] = {
        "region": prices.region,
        "as_of": prices.as_of,
        "source": prices.source,
        "hourly_usd": dict(prices.hourly_usd),
    }
    if overrides:
        document["overrides"] = overrides
    parse_prices(document, where="the new prices", region=prices.region)
    text = json.dumps(document, indent=2) + "\n"
    if len(text) > MAX_BYTES:
        raise ConfigError(f"the new prices take {len(text)} characters; expected at most {MAX_BYTES} bytes")
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    num_new = sum(name not in old for name in prices.hourly_usd)
    num_changed = sum(old.get(name, price) != price for name, price in prices.hourly_usd.items())
    return (
        f"{path}: {len(prices.hourly_usd)} prices of {prices.region} as of {prices.as_of}, {num_new} new, "
        f"{num_changed} changed, {len(overrides)} overrides kept\nuse them with --price-file {path}"
    )
