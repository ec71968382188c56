"""Metric definitions. SageMaker uses them to read the launcher's figures from the logs of a job.

They have their own module, because users also add them to an estimator that they do not `prepare`.
"""

from __future__ import annotations

import re

from hetero.metrics.lines import METRIC_MARK, METRIC_NAMES
from hetero.metrics.logged import LOG_MARK

__all__ = ["METRIC_DEFINITIONS", "MPIRUN_TAG", "logged_metric"]

MPIRUN_TAG = r"\[[^\]]*\]<std(?:out|err)>: ?"
"""Pattern of the prefix that mpirun or the toolkit adds to each line of a process that mpirun started."""


def _definition(name: str) -> dict[str, str]:
    # The pattern matches only lines of the launcher itself. Lines that the launcher relays, for example from a script,
    # begin differently.
    line = rf"{re.escape(METRIC_MARK)} {re.escape(name)}=([0-9.]+)"
    return {"Name": f"hetero:{name}", "Regex": rf"^(?:{MPIRUN_TAG})?\[[^\]]*\] INFO {line}$"}


METRIC_DEFINITIONS = [_definition(name) for name in METRIC_NAMES]
"""Definitions to add to an estimator's ``metric_definitions``, one for each figure that the launcher logs.

A job has at most 40 definitions. Each regular expression has at most 500 characters.
"""


def logged_metric(name: str, *, rank: int = 0) -> dict[str, str]:
    """Return the definition of a metric that the script logs with `hetero.log_metric`.

    Add it to an estimator's ``metric_definitions``, and the service shows the metric's values.

    Args:
        name: Name of the metric.
        rank: The rank whose values count.
    """
    # The launcher writes the name of the rank before a line of the script. Without the launcher, a line has no such
    # prefix.
    line = rf"{re.escape(LOG_MARK)} {re.escape(name)}=([-+.0-9e]+)"
    return {"Name": name, "Regex": rf"(?:^|\brank {rank}: ){line}"}
