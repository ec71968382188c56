"""The JSON schemas of ``report.json`` and ``profile.json``, derived from the dataclasses of these files.

The package contains the schemas for readers in other languages. ``python -m tests.report.json_schemas`` renews them.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import hetero
from hetero.documents.records import limits
from hetero.metrics.profile.profile import SCHEMA_VERSION as PROFILE_VERSION
from hetero.metrics.profile.profile import Profile
from hetero.report.model import SCHEMA_VERSION as REPORT_VERSION
from hetero.report.model import Report

PACKAGE = Path(hetero.__file__).parent
SCHEMAS = {
    "metrics/profile/data/profile.schema.json": (Profile, f"hetero profile, version {PROFILE_VERSION}"),
    "report/data/report.schema.json": (Report, f"hetero report, version {REPORT_VERSION}"),
}


def json_schema(cls: type[Any], title: str) -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12) of the JSON values of a dataclass.

    Args:
        cls: The dataclass of the whole document.
        title: Title of the schema.
    """
    definitions: dict[str, Any] = {}
    _object(cls, definitions)
    document = definitions.pop(cls.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **document,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(cls: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in definitions:
        hints = typing.get_type_hints(cls)
        fields = dataclasses.fields(cls)
        missing = dataclasses.MISSING
        definitions[cls.__name__] = {
            "type": "object",
            "additionalProperties": False,
            "required": [f.name for f in fields if f.default is missing and f.default_factory is missing],
            "properties": {f.name: _schema(hints[f.name], f.metadata or limits(), definitions) for f in fields},
        }
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _schema(hint: Any, bounds: typing.Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return {"anyOf": [_schema(inner, bounds, definitions), {"type": "null"}]}
    if origin is tuple:
        least = {"minItems": bounds["min_items"]} if bounds["min_items"] else {}
        items = _schema(arguments[0], bounds, definitions)
        return {"type": "array", **least, "maxItems": bounds["max_items"], "items": items}
    if origin is dict:
        values = _schema(arguments[1], bounds, definitions)
        return {"type": "object", "maxProperties": bounds["max_items"], "additionalProperties": values}
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type[Any]", hint), definitions)
    if hint is str:
        if bounds["choices"]:
            return {"enum": list(bounds["choices"])}
        return {"type": "string", "maxLength": bounds["max_length"]}
    if hint is bool:
        return {"type": "boolean"}
    kind = "integer" if hint is int else "number"
    return {"type": kind, "minimum": bounds["minimum"], "maximum": bounds["maximum"]}


if __name__ == "__main__":
    for path, (kind, name) in SCHEMAS.items():
        (PACKAGE / path).write_text(json.dumps(json_schema(kind, name), indent=2) + "\n", encoding="utf-8")
