"""Requests for batches."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import ConfigError
from tests.support.batches.subjects import request


def test_request_with_inconsistent_fields_raises() -> None:
    with pytest.raises(ConfigError, match="3 indices but 1 occurrences"):
        request(occurrences=np.zeros(1, np.uint32))
    with pytest.raises(ConfigError, match="3 indices, expected exactly 1"):
        request(collate=False)
