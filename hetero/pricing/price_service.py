"""Current prices from AWS's price list service.

Unlike the offer file, the service needs an account and network access.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hetero.errors import ConfigError
from hetero.pricing.offers import OFFER, PriceList, hourly_usd, price_list, trained_type

__all__ = ["fetch_prices"]

_SERVICE_REGION = "us-east-1"
"""Region of the service, which returns the prices of all regions."""
_MAX_PAGES = 1000
"""Maximum number of pages with 100 products each. AmazonSageMaker has thousands of products per region."""


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
        raise ConfigError(f"boto3 is not installed; pip install boto3, or {_FROM_FILE}") from None
    prices: dict[str, float] = {}
    head: dict[str, Any] = {}
    try:
        for product in _products(client or _client(), region):
            found, usd = trained_type(product.get("product")), hourly_usd((product.get("terms") or {}).get("OnDemand"))
            if found is not None and found[1] == region and usd is not None:
                prices[found[0]] = max(usd, prices.get(found[0], 0.0))
                head = max(head, product, key=lambda item: str(item.get("publicationDate", "")))
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(f"AWS's price list cannot be read: {str(error)[:300]}\n  to do: {_FROM_FILE}") from error
    if not prices:
        raise ConfigError(f"AWS lists no prices of training in {region!r}; expected a region such as eu-west-1")
    return price_list(region, head, prices)


_FROM_FILE = (
    "download https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/AmazonSageMaker/current/REGION/index.json "
    "and give it to --from-file"
)


def _client() -> Any:
    import boto3

    return boto3.client("pricing", region_name=_SERVICE_REGION)


def _products(client: Any, region: str) -> Iterator[dict[str, Any]]:
    request = {
        "ServiceCode": OFFER,
        "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        "FormatVersion": "aws_v1",
        "MaxResults": 100,
    }
    for _ in range(_MAX_PAGES):
        page = client.get_products(**request)
        for text in page.get("PriceList", []):
            product = json.loads(text)
            if isinstance(product, dict):
                yield product
        if not page.get("NextToken"):
            return
        request["NextToken"] = page["NextToken"]
    raise ConfigError(f"AWS's price list has more than {_MAX_PAGES} pages for {region}; expected fewer")
