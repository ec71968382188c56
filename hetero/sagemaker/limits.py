"""Bounds of the service on a request: data in ``limits.yaml``, each with its source, and what breaks them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hetero.system.documents import parse_yaml

__all__ = ["Limit", "breaches", "limits", "values_at"]

_STEP = re.compile(r"(\w+)|(\[\])|(\{keys\})|(\{\})|\.")
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the service accepts at one place of a request."""

    path: str
    """Names of members; ``[]`` stands for each item of a list, ``{}`` for each value, ``{keys}`` for each key."""
    source: str
    """The page that states it."""
    counts: str = ""
    """What is bounded: ``items``, ``characters`` or the ``number`` itself; empty: neither."""
    low: int | None = None
    high: int | None = None
    pattern: str | None = None
    """A regular expression that the whole text matches."""
    values: tuple[str, ...] = ()
    """The only values that there are; empty: any."""

    def explain(self, value: Any) -> str | None:
        """Return what is wrong with a value in words, without the value itself; None if nothing is."""
        if self.values and value not in self.values:
            return f"none of {', '.join(self.values)}"
        if self.counts:
            size = value if self.counts == "number" else len(value)
            unit = "" if self.counts == "number" else f" {self.counts}"
            if self.high is not None and size > self.high:
                return f"{size}{unit}, at most {self.high}"
            if self.low is not None and size < self.low:
                return f"{size}{unit}, at least {self.low}"
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            return f"not of the form {self.pattern}"
        return None


@functools.cache
def limits() -> Mapping[str, Limit]:
    """Return the shipped limits by path."""
    content = resources.files("hetero.sagemaker").joinpath("limits.yaml").read_bytes()
    document: Any = parse_yaml(content, "limits.yaml")
    rows = [{"source": document["source"], **row} for row in document["limits"]]
    return {row["path"]: Limit(**{**row, "values": tuple(row.get("values", ()))}) for row in rows}


def values_at(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what stands in a request at a limit's path, with the path that leads to each; members that lack: nothing.

    Values of a type that the path does not expect are left out: `TrainingRequest.parse` speaks of those.
    """
    waiting = [("", document)]
    for step in _STEP.finditer(path):
        if step[0] != ".":
            waiting = [found for where, value in waiting for found in _inside(where, value, step)]
    yield from waiting


def _inside(where: str, value: Any, step: re.Match[str]) -> Iterator[tuple[str, Any]]:
    name, items, keys, _ = step.groups()
    if items:
        if isinstance(value, list):
            yield from ((f"{where}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        if name is None:
            yield from ((f"{where}[{key!r:.60}]", key if keys else item) for key, item in value.items())
        elif value.get(name) is not None:
            yield f"{where}.{name}" if where else name, value[name]


def breaches(document: Mapping[str, Any], limit: Limit) -> str | None:
    """Return where a request breaks a limit and how, for a person to read; None if it does not.

    Values are not shown: they may be secrets.
    """
    kinds: tuple[type, ...] = {"items": (list, dict), "characters": (str,), "number": (int,)}.get(limit.counts, (str,))
    found = []
    for where, value in values_at(document, limit.path):
        if isinstance(value, kinds) and (reason := limit.explain(value)) is not None:
            found.append(f"{where}: {reason}")
    if not found:
        return None
    more = f", and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + more
