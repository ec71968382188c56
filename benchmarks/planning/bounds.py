"""Lower bounds of simulated step times. They let the search leave out candidates.

A bound is never more than what a simulation shows, apart from its noise. It may be much less.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from planning.draws import draw
from planning.machines import MachineType
from planning.processors import progress
from planning.readers import MAX_WINDOW_BYTES
from planning.scenarios import Scenario

__all__ = ["Bounds"]


class Bounds:
    """Lower bounds of step times of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        workload, draws = scenario.workload, draw(scenario.workload, scenario.seed)
        self._scenario = scenario
        num_ranks = workload.num_ranks
        steps = np.asarray(draws.step_s[: len(draws.step_s) // num_ranks * num_ranks]).reshape(-1, num_ranks)
        headspace_s = float(steps.max(axis=1).mean())
        self._cpu_s = float(np.mean(draws.batch_cpu_s))
        self._wait_s = float(np.mean(draws.batch_wait_s))
        nics = scenario.trainer.nic_bytes_per_s * scenario.num_trainers
        self._nic_batches_per_s = nics / workload.batch_bytes if workload.batch_bytes else math.inf
        fastest = max(machine.speed for machine in (scenario.trainer, *scenario.menu))
        batch_s = self._cpu_s / fastest + self._wait_s
        window_bytes = min(MAX_WINDOW_BYTES, scenario.trainer.memory_bytes / 4 / (num_ranks // scenario.num_trainers))
        window = max(1.0, window_bytes / workload.batch_bytes) if workload.batch_bytes else math.inf
        # No number of endpoints makes steps shorter than this: the accelerator, the first batch of each epoch, and a
        # full window whose batches each take at least the time of their computation.
        self._least_s = max(headspace_s + 0.5 * batch_s / workload.steps_per_epoch, batch_s / window)

    def step_s(self, remote_rates: npt.NDArray[np.float64], trainer_endpoints: int) -> npt.NDArray[np.float64]:
        """Return lower bounds for data hosts that make these numbers of batches per second.

        They are infinite without supply, and NaN where a rate is.
        """
        rates = np.minimum(remote_rates, self._nic_batches_per_s) + self._trainer_rate(trainer_endpoints)
        with np.errstate(divide="ignore"):
            return np.maximum(self._scenario.workload.num_ranks / rates, self._least_s)

    def host_rates(self, endpoints_per_host: int = 0) -> npt.NDArray[np.float64]:
        """Return the largest number of batches per second of one host of each type of the menu.

        It is NaN if this number of endpoints does not fit into the memory. 0 means one per vCPU.
        """
        return np.array([self._host_rate(machine, endpoints_per_host) for machine in self._scenario.menu])

    def _host_rate(self, machine: MachineType, endpoints: int) -> float:
        scenario, batch_bytes = self._scenario, self._scenario.workload.batch_bytes
        if endpoints > scenario.fitting_endpoints(machine):
            return math.nan
        rate = self._rate(machine, endpoints or scenario.data_endpoints(machine))
        return min(rate, machine.nic_bytes_per_s / batch_bytes) if batch_bytes else rate

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one object per search
    def _trainer_rate(self, endpoints: int) -> float:
        return self._scenario.num_trainers * self._rate(self._scenario.trainer, endpoints)

    def _rate(self, machine: MachineType, endpoints: int) -> float:
        alone_s = self._cpu_s / machine.speed + self._wait_s
        duty = self._cpu_s / machine.speed / alone_s if alone_s else 1.0
        counts = sorted({*range(1, endpoints + 1, max(1, endpoints // 8)), endpoints} - {0})
        curve, vcpus = self._scenario.curve, machine.vcpus
        total = max((num * progress(vcpus, curve, duty, num, 0, 0.0, 0.0)[0] for num in counts), default=0.0)
        return total / alone_s
