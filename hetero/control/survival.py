"""Threads that must go on, whatever happens in one turn of theirs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["Survival"]

logger = logging.getLogger(__name__)


class Survival:
    """Logs errors that nobody expected, each once, and lets the thread go on. For one thread."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Survive errors of the block, which does ``what``."""
        try:
            yield
        except Exception as error:
            text = f"{what} failed: {error!r}"
            if text not in self._said:
                self._said.add(text)
                logger.exception("%s; going on", text)
