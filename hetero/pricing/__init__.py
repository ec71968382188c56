"""Instance types, their prices if the user or a file states them, and cost arithmetic."""

from __future__ import annotations

from hetero.pricing.catalog import Catalogue, InstanceTypeInfo, Price
from hetero.pricing.tables import list_text, show_text

__all__ = ["Catalogue", "InstanceTypeInfo", "Price", "list_text", "show_text"]
