"""What a loader may be called: its name travels to the launcher and stands in reports."""

from __future__ import annotations

from hetero.errors import ConfigError

__all__ = ["check_name"]

_MAX_NAME_CHARS = 200


def check_name(name: object) -> None:
    """Refuse a loader's name that cannot be told to the launcher, or shown: with it a rank's report would be lost.

    Raises:
        ConfigError: It is one.
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
