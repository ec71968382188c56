"""Metrics that a training script logs, such as its accuracy, with the time of each value.

A rank keeps its values in a `MetricLog`, and the report of the run contains them. The rank also writes each value as a
line of its log. `read_metric_line` reads such a line. A `MetricPattern` reads a metric from lines of another form, as
the metric definitions of a platform do.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hetero.documents.records import MAX_ITEMS, limits
from hetero.documents.text import MAX_NAME_CHARS, MAX_TEXT_CHARS, printable
from hetero.errors import ConfigError

__all__ = [
    "LOG_MARK",
    "MAX_NAMES",
    "MAX_VALUES",
    "LoggedMetric",
    "MetricLog",
    "MetricPattern",
    "check_value",
    "is_metric_name",
    "last_values",
    "metric_line",
    "read_metric_line",
    "thinned",
]

LOG_MARK = "hetero.log_metric"
"""First word of the line of a logged value."""
MAX_VALUES = MAX_ITEMS
"""Limit of the values that one rank keeps, because a list in a report is not longer."""
MAX_NAMES = 100
"""Limit of the names that one rank keeps values of."""
_MAX_STEP = 2**53
_NAME = re.compile(rf"[^\s=]{{1,{MAX_NAME_CHARS}}}")
_LINE = re.compile(rf"{re.escape(LOG_MARK)} (?P<name>{_NAME.pattern})=(?P<value>\S+)(?: step=(?P<step>\d{{1,16}}))?$")


def is_metric_name(text: str) -> bool:
    """Return whether a text can be the name of a metric."""
    return text.isprintable() and _NAME.fullmatch(text) is not None


_NAME_LIMITS = limits(
    accepts=is_metric_name, expected=f"1 to {MAX_NAME_CHARS} printable characters without spaces and ="
)
_VALUE_LIMITS = limits(minimum=-sys.float_info.max, maximum=sys.float_info.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMetric:
    """One value of a metric."""

    name: str = field(metadata=_NAME_LIMITS)
    value: float = field(metadata=_VALUE_LIMITS)
    """A finite number."""
    step: int | None = field(default=None, metadata=limits(maximum=_MAX_STEP))
    """Step of the training as the script counts it. None if the script stated none."""
    at_s: float
    """Seconds since the start of the run, on the clock of the rank's host that no change of the time affects."""
    unix_s: float = 0.0
    """Wall-clock time in seconds since 1970. 0 if unknown."""
    rank: int = field(default=0, metadata=limits(maximum=1e6))


def check_value(name: object, value: object, step: object) -> tuple[str, float, int | None]:
    """Return the arguments of `hetero.log_metric` as plain Python values.

    Raises:
        ConfigError: If an argument is rejected. The message names it.
    """
    if not isinstance(name, str) or not is_metric_name(name):
        raise ConfigError(
            f"log_metric: name is {printable(repr(name), max_chars=60)}; expected {_NAME_LIMITS['expected']}"
        )
    # A value that is not a number becomes NaN here, and the check below rejects NaN.
    try:
        # Reject texts, because float() would accept a text such as "0.9".
        number = math.nan if isinstance(value, (str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # For example, a tensor of several elements raises RuntimeError.
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(
            f"log_metric: the value of {name!r} is {printable(repr(value), max_chars=60)}; expected one finite number\n"
            "  to do: log only values that are finite, or find out why this one is not"
        )
    if step is None:
        return name, number, None
    # A step that is not a whole number becomes -1 here, and the check below rejects -1.
    try:
        count = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= _MAX_STEP:
        found = printable(repr(step), max_chars=60)
        raise ConfigError(f"log_metric: the step of {name!r} is {found}; expected a whole number from 0 to 2^53")
    return name, number, count


def metric_line(name: str, value: float, step: int | None) -> str:
    """Return the line of the log for a value, for example ``hetero.log_metric f1=0.931 step=300``."""
    return f"{LOG_MARK} {name}={value!r}" + ("" if step is None else f" step={step}")


def read_metric_line(line: str) -> tuple[str, float, int | None] | None:
    """Return name, value and step of a line of a log that ends with a text of `metric_line`. None for another line."""
    # Search only the start of a long line, because a line of another program may have megabytes. The line of a metric
    # is shorter than this limit.
    text = line.rstrip()[:MAX_TEXT_CHARS]
    mark_position = text.find(LOG_MARK)
    found = _LINE.match(text, mark_position) if mark_position >= 0 else None
    value = None if found is None else _number(found["value"])
    if found is None or value is None:
        return None
    return found["name"], value, None if found["step"] is None else int(found["step"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPattern:
    """Reads a metric from lines of a log by a regular expression, as the platform's metric definitions do.

    Raises:
        ConfigError: If the name or the expression is rejected.
    """

    name: str
    regex: str
    """Expression with one group, which is the number. It is searched anywhere in a line."""

    def __post_init__(self) -> None:
        if not is_metric_name(self.name):
            raise ConfigError(f"metric {printable(self.name, max_chars=60)!r}: expected {_NAME_LIMITS['expected']}")
        try:
            num_groups = re.compile(self.regex).groups
        except re.error as error:
            raise ConfigError(f"metric {self.name}: regex {self.regex!r} cannot be used: {error}") from error
        if num_groups != 1:
            expected = "one group in parentheses, which is the number"
            raise ConfigError(f"metric {self.name}: regex has {num_groups} groups; expected {expected}")

    def read(self, line: str) -> float | None:
        """Return the value in a line, or None if the line lacks one. Only the start of a long line is searched."""
        found = re.search(self.regex, line[:MAX_TEXT_CHARS])
        # The group is None if it is in an alternative that did not match.
        return None if found is None or found[1] is None else _number(found[1])


def _number(text: str) -> float | None:
    """Return the number in a text, or None if the text is not a number, or the number is not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def thinned(values: Sequence[LoggedMetric], max_values: int) -> tuple[LoggedMetric, ...]:
    """Return at most ``max_values`` of the values, in their order.

    While there are too many, every second value of the name with the most values is dropped. The first and the last
    value of each name stay, unless there are more names than room for them. Then only last values stay.
    """
    if len(values) <= max_values:
        return tuple(values)
    places_by_name: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        places_by_name.setdefault(value.name, []).append(place)
    # Halve the longest series until there is room.
    num_left = len(values)
    while num_left > max_values:
        longest = max(places_by_name.values(), key=len)
        if len(longest) < 3:
            # The limit leaves no room for the first and the last value of each name. Only last values stay.
            last_places = sorted(places[-1] for places in places_by_name.values())
            return tuple(values[place] for place in last_places[:max_values])
        halved = [*longest[:-1:2], longest[-1]]
        num_left -= len(longest) - len(halved)
        longest[:] = halved
    return tuple(values[place] for place in sorted(itertools.chain(*places_by_name.values())))


class MetricLog:
    """Values that one rank has logged. Thread-safe.

    It keeps at most 10,000 values of at most 100 names. If there are more values, every second one of the longest
    series is dropped, see `thinned`. Values of further names are not kept.

    Args:
        rank: The rank.
        elapsed_s: Seconds since the start of the run, now.
        clock: Monotonic clock in seconds.
        wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = clock() - elapsed_s
        self._lock = threading.Lock()
        self._values: list[LoggedMetric] = []
        self._names: set[str] = set()
        self._version = 0
        """Number of values that were added. A caller of `since` knows by it whether there is a new one."""

    def elapsed_s(self) -> float:
        """Return the seconds since the start of the run."""
        return max(0.0, self._clock() - self._started_s)

    def add(self, name: str, value: float, step: int | None = None) -> bool:
        """Keep a value that `check_value` returned. Return False if there are too many names to keep it."""
        with self._lock:
            if name not in self._names and len(self._names) >= MAX_NAMES:
                return False
            self._names.add(name)
            # A report accepts no negative time.
            at_s, unix_s = self.elapsed_s(), max(0.0, self._wall_clock())
            logged = LoggedMetric(name=name, value=value, step=step, at_s=at_s, unix_s=unix_s, rank=self._rank)
            self._values.append(logged)
            if len(self._values) > MAX_VALUES:
                self._values = list(thinned(self._values, MAX_VALUES))
            self._version += 1
            return True

    def since(self, version: int) -> tuple[int, tuple[LoggedMetric, ...] | None]:
        """Return the current version and all values, or None instead of the values if the version is the given one."""
        with self._lock:
            # A rank always sends all its values. Without a new one, it would only repeat what it has sent.
            return self._version, None if version == self._version else tuple(self._values)


def last_values(values: Iterable[LoggedMetric]) -> dict[str, float]:
    """Return the last value of each metric by its name. If several ranks logged a metric, the lowest rank counts.

    The metrics are in the order of the first values of their names.
    """
    found: dict[str, LoggedMetric] = {}
    for value in values:
        known = found.get(value.name)
        # A lower rank wins. Values of one rank with the same time are in order, so the later one wins.
        if known is None or (-value.rank, value.at_s) >= (-known.rank, known.at_s):
            found[value.name] = value
    return {name: value.value for name, value in found.items()}
