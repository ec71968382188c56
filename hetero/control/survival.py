"""Threads that continue after an unexpected error in one of their turns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["Survival"]

logger = logging.getLogger(__name__)


class Survival:
    """Logs unexpected errors, each one once, and lets the thread continue. Use one object per thread."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Catch and log errors of the block.

        Args:
            what: What the block does, for the log.
        """
        try:
            yield
        except Exception as error:
            text = f"{what} failed: {error!r}"
            if text not in self._said:
                self._said.add(text)
                logger.exception("%s; going on", text)
