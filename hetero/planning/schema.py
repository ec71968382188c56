"""The JSON schema of ``profile.json``, derived from the dataclasses.

``data/profile.schema.json`` contains the schema for readers in other languages. Renew it with
``python -m hetero.planning.schema > hetero/planning/data/profile.schema.json``. A test compares the two.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hetero.planning.profile import SCHEMA_VERSION, Profile
from hetero.system.json_schema import json_schema

__all__ = ["profile_schema"]


def profile_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12)."""
    return json_schema(Profile, f"hetero profile, version {SCHEMA_VERSION}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(profile_schema(), indent=2) + "\n")
