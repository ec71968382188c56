"""Log lines that say where they come from, and cannot be forged by what they quote.

Every line goes to standard error as ``[group host role] LEVEL message`` in
one write, without colours. Control characters are escaped, and a message of
several lines has the prefix on each: nothing that a remote traceback or a
training script prints can look like another host's line.
"""

from __future__ import annotations

import logging
import re
import sys

__all__ = ["escape_line", "relay_line", "setup_logging", "write_line"]

# C0 without tab, DEL, C1, line separators, direction overrides, and halves of surrogate pairs.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def setup_logging(group: str, host: str, role: str, level: str = "info") -> None:
    """Send this process's log to standard error with a prefix; a second call replaces the first.

    Args:
        group: Instance group, or what else this process is; empty parts are left out.
        host: Name of this host.
        role: Its role.
        level: ``debug``, ``info``, ``warning`` or ``error`` for hetero's own
            messages; those of libraries are shown from ``warning`` up, unless it is ``debug``.
    """
    _output.prefix = f"[{' '.join(_escape_part(part) for part in (group, host, role) if part)}] "
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    root.addHandler(_Handler())
    own_level = logging.getLevelName(level.upper())
    root.setLevel(own_level if own_level == logging.DEBUG else max(own_level, logging.WARNING))
    logging.getLogger("hetero").setLevel(own_level)


def escape_line(text: str) -> str:
    r"""Return the text on one line, with control characters as ``\xNN`` or ``\uNNNN``; tabs stay."""
    return _CONTROL.sub(_escape, text)


def _escape_part(text: str) -> str:
    """Return a name for the prefix, which it must not be able to end: group names may hold anything."""
    return escape_line(text).replace("[", r"\x5b").replace("]", r"\x5d")


def relay_line(source: str, text: str) -> None:
    """Write one line of a child's output with this process's prefix.

    Args:
        source: What the child is, for example ``rank 1``.
        text: Its line, without the end.
    """
    write_line(f"{_output.prefix}{source}: {text}")


def write_line(line: str) -> None:
    """Write a line that has its prefix already, escaped, in one write.

    A closed or full output loses the line and stops nothing.
    """
    try:
        sys.stderr.write(escape_line(line) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


class _Output:
    """What this process puts before its lines."""

    prefix = ""


class _Handler(logging.Handler):
    """Writes every line of a record with the prefix; lines after the first are marked."""

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write a record."""
        try:
            first, *others = self.format(record).splitlines() or [""]
        except Exception:  # noqa: BLE001
            # A message that cannot be formatted must not end the thread that logs it.
            self.handleError(record)
            return
        head = f"{_output.prefix}{record.levelname} "
        write_line(head + first)
        for line in others:
            write_line(f"{head}| {line}")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


_output = _Output()
