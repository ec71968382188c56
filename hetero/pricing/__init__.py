"""Instance types, their prices, and cost arithmetic. The user or a file states the prices.

catalog.py        the catalogue of instance types, with prices from the user, a file or a shipped price profile
instance_types.py one instance type: its facts with their sources, and its price
cost.py           cost arithmetic
tables.py         the output of ``hetero prices``
price_service.py  ``hetero prices refresh``: asks AWS's price list service, which needs an account and boto3
data/             the shipped facts and price profiles

The code runs in the launcher that writes the report, and in the user's shell.
"""

from __future__ import annotations

from hetero.pricing.catalog import Catalogue
from hetero.pricing.instance_types import FactSource, InstanceTypeInfo, Price, family_of, stated_resources
from hetero.pricing.tables import list_text, show_text

__all__ = [
    "Catalogue",
    "FactSource",
    "InstanceTypeInfo",
    "Price",
    "family_of",
    "list_text",
    "show_text",
    "stated_resources",
]
