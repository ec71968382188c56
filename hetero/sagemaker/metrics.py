"""What SageMaker is to look for in the logs of a job: one definition for each figure that the launcher logs."""

from __future__ import annotations

import re

from hetero.metrics.lines import METRIC_MARK, METRIC_NAMES

__all__ = ["METRIC_DEFINITIONS", "MPIRUN_TAG"]

MPIRUN_TAG = r"\[[^\]]*\]<std(?:out|err)>: ?"
"""Before every line of a process that mpirun made, in the toolkit's words or mpirun's own."""


def _definition(name: str) -> dict[str, str]:
    # Anchored to lines that a launcher says itself: what it quotes, of a script say, has other words before.
    line = rf"{re.escape(METRIC_MARK)} {re.escape(name)}=([0-9.]+)"
    return {"Name": f"hetero:{name}", "Regex": rf"^(?:{MPIRUN_TAG})?\[[^\]]*\] INFO {line}$"}


METRIC_DEFINITIONS = [_definition(name) for name in METRIC_NAMES]
"""For ``metric_definitions`` of an estimator, beside one's own: a job has at most 40, of 500 characters each."""
