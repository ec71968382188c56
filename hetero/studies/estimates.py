"""How long the runs of a study will take, from the runs that have finished."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hetero.studies.runs import FINISHED, PlannedRun, RunResult

__all__ = ["Estimates"]


class Estimates:
    """Expected durations of runs.

    The first of these that exists counts:

    1. the mean of the finished runs with the same levels,
    2. the larger of the stated duration and that of the longest finished run on the same cluster, because a budget
       must not be passed.

    Args:
        stated_s: Stated durations in seconds by run id.
    """

    def __init__(self, stated_s: Mapping[str, float]) -> None:
        self._stated_s = stated_s
        self._by_levels: dict[str, list[float]] = {}
        self._by_cluster: dict[str, list[float]] = {}

    def add(self, run: PlannedRun, result: RunResult) -> None:
        """Learn from a run that has ended. Only finished runs count."""
        if result.state == FINISHED:
            self._by_levels.setdefault(_levels_key(run), []).append(result.wall_s)
            self._by_cluster.setdefault(_cluster_key(run), []).append(result.wall_s)

    def expected_s(self, run: PlannedRun) -> float | None:
        """Return the expected wall time of a run in seconds, or None if nothing is known."""
        same = self._by_levels.get(_levels_key(run))
        if same:
            return sum(same) / len(same)
        stated_s = self._stated_s.get(run.run_id)
        known = [*self._by_cluster.get(_cluster_key(run), ()), *(() if stated_s is None else (stated_s,))]
        return max(known, default=None)


def _levels_key(run: PlannedRun) -> str:
    levels = {name: level for name, level in run.levels.items() if name != "seed"}
    return json.dumps([levels, run.script], sort_keys=True, default=str)


def _cluster_key(run: PlannedRun) -> str:
    return json.dumps([run.groups, dict(run.options)], sort_keys=True, default=str)
