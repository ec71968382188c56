"""AWS's own price list: hourly on-demand prices of training on each instance type, in one region.

Source of the format:
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/reading-service-price-list-file-for-services.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.pricing.catalog import MAX_HOURLY_USD
from hetero.pricing.json_stream import JsonStream

__all__ = ["OFFER", "PriceList", "hourly_usd", "is_ours", "price_list", "read_offer_file", "trained_type"]

OFFER = "AmazonSageMaker"
_SOURCE = f"AWS price list of {OFFER}, on demand, version"
_TRAINING = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9]+)")
"""Matches usage types of training, such as ``EUW1-Train:ml.c5.xlarge``, but not those of warm pools or endpoints."""
_MAX_REGIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices of one region."""

    region: str
    as_of: str
    """ISO date of AWS's publication."""
    source: str
    hourly_usd: Mapping[str, float]
    """Instance type -> USD per hour, in (0, 1000)."""


def trained_type(product: Any) -> tuple[str, str] | None:
    """Return the instance type and region of a product that is an hour of training. None for other products."""
    attributes = product.get("attributes") if isinstance(product, Mapping) else None
    if not isinstance(attributes, Mapping):
        return None
    usage = _TRAINING.fullmatch(str(attributes.get("usagetype")))
    region = attributes.get("regionCode")
    return (usage[1], region) if usage and isinstance(region, str) else None


def hourly_usd(offers: Any) -> float | None:
    """Return the highest hourly price in USD in the offers for a product, or None if they state none."""
    found = (
        dimension["pricePerUnit"].get("USD")
        for offer in _values(offers)
        for dimension in _values(offer.get("priceDimensions"))
        if dimension.get("unit") in ("Hrs", "Hours") and isinstance(dimension.get("pricePerUnit"), Mapping)
    )
    prices = [price for text in found if (price := _number(text)) is not None and 0 < price < MAX_HOURLY_USD]
    return max(prices, default=None)


def read_offer_file(path: Path, region: str) -> PriceList:
    """Read the prices of one region from an offer file. A file of gigabytes takes time, but little memory.

    Args:
        path: ``index.json`` of AmazonSageMaker, for all regions or for one.
        region: Region of the prices, such as ``eu-west-1``.

    Raises:
        ConfigError: If the file cannot be read, is not an offer file of AmazonSageMaker, or lacks prices for this
            region.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _read(JsonStream(file, str(path)), str(path), region)
    except OSError as error:
        raise ConfigError(f"offer file {path}: {error.strerror or error}") from error


def _read(stream: JsonStream, source: str, region: str) -> PriceList:
    head: dict[str, Any] = {}
    types: dict[str, str] | None = None
    regions: set[str] = set()
    prices: dict[str, float] = {}
    # Read the file in one pass. The products must come before the terms, because the terms name products only by SKU.
    for name in stream.members():
        if name in ("offerCode", "version", "publicationDate"):
            head[name] = stream.value()
        elif name == "products":
            types = _products(stream, region, regions)
        elif name == "terms":
            if types is None:
                raise ConfigError(f"{source}: found terms before products; expected an offer file from AWS")
            for kind in stream.members():
                _terms(stream, types, prices) if kind == "OnDemand" else stream.skip()
        else:
            stream.skip()
    # Reject the file of another service, and one without prices for the region.
    if head.get("offerCode") != OFFER:
        raise ConfigError(f"{source}: offerCode is {head.get('offerCode')!r:.60}; expected the offer file of {OFFER}")
    found = price_list(region, head, prices)
    if not found.hourly_usd:
        there = ", ".join(sorted(regions)) or "no region"
        raise ConfigError(f"{source} has no prices of training in {region}; give a --region that it has: {there}")
    return found


def price_list(region: str, head: Mapping[str, Any], prices: Mapping[str, float]) -> PriceList:
    """Return the price list of a region, sorted by instance type.

    Args:
        region: Region of the prices.
        head: ``publicationDate`` and ``version`` as AWS states them.
        prices: Instance type -> USD per hour.
    """
    version, date = (str(head.get(name, ""))[:40] for name in ("version", "publicationDate"))
    ordered = {name: prices[name] for name in sorted(prices)}
    return PriceList(region=region, as_of=date[:10], source=f"{_SOURCE} {version}", hourly_usd=ordered)


def is_ours(source: object) -> bool:
    """Return whether prices with this source come from AWS's list instead of from the user."""
    return isinstance(source, str) and source.startswith(_SOURCE)


def _products(stream: JsonStream, region: str, regions: set[str]) -> dict[str, str]:
    """Return SKU -> instance type for training in the region. Add all regions of the file to ``regions``."""
    types = {}
    for sku in stream.members():
        if (found := trained_type(stream.value())) is not None:
            if len(regions) < _MAX_REGIONS:
                regions.add(found[1])
            if found[1] == region:
                types[sku] = found[0]
    return types


def _terms(stream: JsonStream, types: Mapping[str, str], prices: dict[str, float]) -> None:
    for sku in stream.members():
        if sku not in types:
            stream.skip()
        elif (usd := hourly_usd(stream.value())) is not None:
            prices[types[sku]] = max(usd, prices.get(types[sku], 0.0))


def _values(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value.values() if isinstance(item, Mapping)] if isinstance(value, Mapping) else []


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
