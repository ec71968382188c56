"""Write a price list into a price file and keep the prices that the user wrote there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetero.documents.files import MAX_BYTES, write_text
from hetero.errors import ConfigError
from hetero.pricing.catalog import parse_prices, read_price_file
from hetero.pricing.price_service import PriceList, is_ours

__all__ = ["refresh_file"]


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
        old = content["hourly_usd"] if is_ours(content.get("source")) else {}
        overrides = {**({} if old else content["hourly_usd"]), **(content.get("overrides") or {})}
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
