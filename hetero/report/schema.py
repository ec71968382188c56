"""The JSON schema of ``report.json``, derived from the dataclasses.

``data/report.schema.json`` contains the schema for readers in other languages. Renew it with
``python -m hetero.report.schema > hetero/report/data/report.schema.json``. A test compares it with the dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from typing import Any

from hetero.report.model import SCHEMA_VERSION, Report
from hetero.system.records import limits

__all__ = ["report_schema"]


def report_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12)."""
    definitions: dict[str, Any] = {}
    _object(Report, definitions)
    report = definitions.pop("Report")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"hetero report, version {SCHEMA_VERSION}",
        **report,
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
        return {"type": "array", "maxItems": bounds["max_items"], "items": _schema(arguments[0], bounds, definitions)}
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
    sys.stdout.write(json.dumps(report_schema(), indent=2) + "\n")
