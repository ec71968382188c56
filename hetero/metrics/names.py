"""The rule for names of loaders, which travel to the launcher and appear in reports."""

from __future__ import annotations

from hetero.errors import ConfigError

__all__ = ["check_name"]

_MAX_NAME_CHARS = 200


def check_name(name: object) -> None:
    """Reject a loader's name that cannot be sent to the launcher or shown. Such a name would lose a rank's report.

    Raises:
        ConfigError: If the name is rejected.
    """
    if not isinstance(name, str) or not name.isprintable():
        found = ascii(name)[:60]
    elif len(name) > _MAX_NAME_CHARS:
        found = f"{name[:20]!r}... of {len(name)} characters"
    else:
        return
    raise ConfigError(
        f"name is {found}, expected at most {_MAX_NAME_CHARS} printable characters\n"
        "  It is the data set's if none is given: pass the loader another one, name='train' for example."
    )
