"""The service's limits on a request, read from ``limits.yaml``, and a search for values that exceed them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hetero.documents.files import parse_yaml

__all__ = ["Limit", "breaches", "limits", "values_at"]

_STEP = re.compile(r"(?P<name>\w+)|(?P<items>\[\])|(?P<keys>\{keys\})|(?P<values>\{\})|\.")
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The values that the service accepts for one member of a request."""

    path: str
    """Path of the member. It consists of member names, ``[]`` for each item of a list, ``{}`` for each value of an
    object and ``{keys}`` for each key."""
    source: str
    """URL of the page that documents the limit."""
    counts: str = ""
    """The quantity that `low` and `high` bound: ``items``, ``characters`` or the ``number`` itself. Empty if unused."""
    low: int | None = None
    high: int | None = None
    pattern: str | None = None
    """Regular expression that must match the whole text."""
    values: tuple[str, ...] = ()
    """The only accepted values. Empty if all values are accepted."""

    def explain(self, value: Any) -> str | None:
        """Return why the limit rejects a value, without the value itself. None if the limit accepts it."""
        if self.values and value not in self.values:
            return f"expected one of {', '.join(self.values)}"
        if self.counts:
            size = value if self.counts == "number" else len(value)
            unit = "" if self.counts == "number" else f" {self.counts}"
            if self.high is not None and size > self.high:
                return f"found {size}{unit}, expected at most {self.high}"
            if self.low is not None and size < self.low:
                return f"found {size}{unit}, expected at least {self.low}"
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            return f"does not match the pattern {self.pattern}"
        return None


@functools.cache
def limits() -> Mapping[str, Limit]:
    """Return the limits in ``limits.yaml``. The keys are their paths."""
    content = resources.files("hetero.sagemaker").joinpath("limits.yaml").read_bytes()
    document: Any = parse_yaml(content, "limits.yaml")
    # A limit without a source has the source of the whole file.
    rows = [{"source": document["source"], **row} for row in document["limits"]]
    return {row["path"]: Limit(**{**row, "values": tuple(row.get("values", ()))}) for row in rows}


def values_at(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a request that a limit's path matches, each with its exact path.

    Missing members and values of a wrong type are skipped. `TrainingRequest.parse` reports wrong types of the members
    that it reads.
    """
    # Begin with the whole document. After each step, `found` has all values that the steps so far lead to.
    found = [("", document)]
    for step in _STEP.finditer(path):
        # Dots only separate steps.
        if step[0] != ".":
            found = [pair for exact_path, value in found for pair in _inside(exact_path, value, step)]
    yield from found


def _inside(exact_path: str, value: Any, step: re.Match[str]) -> Iterator[tuple[str, Any]]:
    """Follow one step of a limit's path from a value. Yield each value that the step leads to, with its exact path.

    A step is the name of a member, ``[]`` for the items of a list, or ``{keys}`` or ``{}`` for the keys or values of an
    object.
    """
    kind, name = step.lastgroup, step[0]
    if kind == "items" and isinstance(value, list):
        yield from ((f"{exact_path}[{index}]", item) for index, item in enumerate(value))
    elif kind == "name" and isinstance(value, Mapping) and value.get(name) is not None:
        yield (f"{exact_path}.{name}" if exact_path else name), value[name]
    elif kind in ("keys", "values") and isinstance(value, Mapping):
        yield from ((f"{exact_path}[{key!r:.60}]", key if kind == "keys" else item) for key, item in value.items())


def breaches(document: Mapping[str, Any], limit: Limit) -> str | None:
    """Return a text that says where and how a request exceeds a limit. None if it does not exceed the limit.

    The text does not contain the values, because they may be secrets.
    """
    # A limit that counts nothing is for texts. Values of another type are reported when the request is parsed.
    kinds: tuple[type, ...] = {"items": (list, dict), "characters": (str,), "number": (int,)}.get(limit.counts, (str,))
    found = []
    for exact_path, value in values_at(document, limit.path):
        if isinstance(value, kinds) and (reason := limit.explain(value)) is not None:
            found.append(f"{exact_path}: {reason}")
    if not found:
        return None
    rest_text = f", and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + rest_text
