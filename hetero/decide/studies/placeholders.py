"""Placeholders in the texts of a study: ``{name}`` becomes a level or a quantity, ``{{`` and ``}}`` become braces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetero.decide.studies.runs import Level
from hetero.errors import ConfigError

__all__ = ["filled", "level_text", "placeholders"]

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


def level_text(level: Level) -> str:
    """Return a level as arguments and file names contain it."""
    return str(level).lower() if isinstance(level, bool) else str(level)


def filled(text: str, values: Mapping[str, Level], path: str) -> str:
    """Return the text with each ``{name}`` replaced, and with ``{{`` and ``}}`` as single braces.

    Args:
        text: The text.
        values: Levels and quantities by name.
        path: Key of the text, for messages.

    Raises:
        ConfigError: If a name is unknown.
    """

    def value_of(match: re.Match[str]) -> str:
        """Return the text that replaces a match: the value of a name, or the single brace of a double one."""
        found, name = match[0], match[1]
        if name is None:
            return "{" if found == "{{" else "}"
        if name not in values:
            raise ConfigError(f"{path}: {{{name}}} is unknown, expected one of {', '.join(sorted(values))}")
        return level_text(values[name])

    return _PLACEHOLDER.sub(value_of, text)


def placeholders(texts: Sequence[str]) -> set[str]:
    """Return the names of all placeholders in texts."""
    return {match[1] for text in texts for match in _PLACEHOLDER.finditer(text) if match[1] is not None}
