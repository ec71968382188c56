"""Prices for the tests of plans."""

from __future__ import annotations

import pytest

from hetero.pricing.catalog import Catalogue


@pytest.fixture
def catalogue() -> Catalogue:
    """The shipped types with the prices of the published tables."""
    return Catalogue.load("seed-2022")
