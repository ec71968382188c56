"""`hetero.log_metric`: lets a script log a metric such as its accuracy."""

from __future__ import annotations

import logging
import threading
from typing import SupportsFloat, SupportsIndex

from hetero.control.rank.session import current
from hetero.metrics.logged import MAX_NAMES, check_value, metric_line
from hetero.system.logs import write_line

__all__ = ["log_metric"]

logger = logging.getLogger(__name__)
_warned = threading.Event()


def log_metric(name: str, value: SupportsFloat, step: SupportsIndex | None = None) -> None:
    """Log a value of a metric, such as the accuracy after an epoch.

    The value becomes a line on standard error, ``hetero.log_metric NAME=VALUE step=STEP``, which the metric definitions
    of a platform can match. In a rank of a job it also becomes part of ``report.json`` (``run.metrics``), with the time
    since the start of the run. Then `hetero study` can tell the time to a quality. Any rank may log. Values of several
    ranks are not combined.

    A rank keeps 10,000 values of at most 100 names. If there are more values, every second value of the longest series
    is dropped. Values of further names, and values of other processes such as loader workers, only become lines.

    Does not block. Thread-safe.

    Args:
        name: Name of the metric: 1 to 200 printable characters, without spaces and ``=``.
        value: A finite number, or an object that ``float`` accepts, such as a tensor of one element.
        step: Step of the training as the script counts it, at least 0.

    Raises:
        ConfigError: If an argument is rejected, also if the value is not finite.
    """
    name, number, count = check_value(name, value, step)
    write_line(metric_line(name, number, count))
    session = current()
    # `add` returns False if the report has the maximum number of names already. Warn once.
    if session is not None and not session.metrics.add(name, number, count):
        if not _warned.is_set():
            logger.warning(
                "the report keeps the values of %d metrics; those of %r and later ones are only in the log",
                MAX_NAMES,
                name,
            )
        _warned.set()
