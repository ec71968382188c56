"""The JSON schema of ``report.json``, derived from the dataclasses.

``data/report.schema.json`` contains the schema for readers in other languages. Renew it with
``python -m hetero.report.schema > hetero/report/data/report.schema.json``. A test compares it with the dataclasses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hetero.report.model import SCHEMA_VERSION, Report
from hetero.system.json_schema import json_schema

__all__ = ["report_schema"]


def report_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12)."""
    return json_schema(Report, f"hetero report, version {SCHEMA_VERSION}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report_schema(), indent=2) + "\n")
