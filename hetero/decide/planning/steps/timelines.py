"""The timelines of clusters with the mean figures of a profile, calibrated with the measured step time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.endpoints import endpoints_on
from hetero.decide.planning.steps.forms import bytes_per_sample, codec_s
from hetero.decide.planning.steps.sharing import pace
from hetero.decide.planning.steps.timeline import Timeline, TimelineHost, TimelineJob
from hetero.decide.planning.steps.uncertain import SPEED_SPREAD, UncertainFigures, error_of_mean
from hetero.metrics.figures import Figure
from hetero.metrics.profile.profile import Profile, TrainingProfile
from hetero.reader.window_size import PREFETCH_FACTOR, WindowGrowth, window_bytes_of
from hetero.report.plan import AS_IS

__all__ = ["Timelines", "window_batches"]

_MUCH_LONGER = 1.5
"""Least ratio of the longest measured step and the longest expected one, if some batches count as slow."""
_SLOW_FACTOR = 4.0
"""How much longer slow batches take. A profile cannot show this factor and the share of slow batches separately. Of the
35 random jobs of bench_planner with slow batches, 54 % have a good plan with this assumption, and 37 % without it."""
_MAX_SLOW_SHARE = 0.06
_NUM_HALVINGS = 6
"""Steps of the search for the share of slow batches."""


class _Known(NamedTuple):
    """What the timeline of a cluster says."""

    is_long: bool
    step_s: float
    longest_step_s: float


class Timelines:
    """Step times of clusters by their timelines, each computed once.

    Args:
        profile: The figures of the job.
        vcpu_speeds: Relative speed of a vCPU by instance type, compared with the profile's first supply.
        endpoints_per_host: Endpoints per data host. None means one per vCPU, or more if they wait for storage.
        measured: The training as it was measured. None if ``profile`` has the measured numbers of hosts and ranks.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        vcpu_speeds: Mapping[str, float],
        endpoints_per_host: int | None,
        measured: TrainingProfile | None = None,
    ) -> None:
        self._profile = profile
        self._training = profile.training
        self._figures = UncertainFigures(profile, vcpu_speeds=vcpu_speeds, num_draws=0)
        self._endpoints_per_host = endpoints_per_host
        self._rank_cores = _value(profile.training.rank_cpu_cores)
        self._known: dict[Candidate, _Known] = {}
        """What the timelines so far say."""
        self.num_batches = 0
        """Batches of all timelines so far. Each takes about 10 us to compute."""
        self._relative_s = self._figures.batch_shape.tolist()
        """Times of batches relative to their mean."""
        self._is_as_measured = measured is None
        """Whether the profile still has the numbers of hosts and ranks that were measured."""
        self.correction = 1.0
        """Factor of the costs of samples on the first type. With it, the timeline of the profiled cluster has the
        measured step time."""
        self.residual_s = 0.0
        """Seconds per step that local loading costs beyond what the timeline knows."""
        if measured is None:
            self._calibrate()
        else:
            # Calibrate with the profile as it was measured, because the measured step time holds only for the measured
            # cluster. It was once compared with the timeline of the planned cluster.
            as_measured = Timelines(
                replace(profile, training=measured), vcpu_speeds=vcpu_speeds, endpoints_per_host=endpoints_per_host
            )
            self.correction, self.residual_s = as_measured.correction, as_measured.residual_s
            self._relative_s = as_measured._relative_s
        self._figures.correction = self.correction

    def is_measured(self, candidate: Candidate) -> bool:
        """Return whether the step time of the cluster was measured."""
        return self._is_as_measured and self._is_profiled(candidate)

    def step_s(self, candidate: Candidate, *, is_long: bool = False) -> float | None:
        """Return the step time in seconds with the mean figures, or None without endpoints.

        Args:
            candidate: The cluster.
            is_long: Whether to follow more batches, which takes longer and is more exact.
        """
        known = self._known.get(candidate)
        # A long timeline replaces a short one, but not the other way round.
        if known is None or (is_long and not known.is_long):
            timeline = self._timeline_of(candidate, is_long=is_long)
            if timeline is None:
                return None
            known = _Known(is_long=is_long, step_s=timeline.mean_step_s(), longest_step_s=timeline.longest_step_s)
            self._known[candidate] = known
            self.num_batches += timeline.num_batches
        return known.step_s

    def _timeline_of(self, candidate: Candidate, *, is_long: bool) -> Timeline | None:
        """Return the timeline of a candidate, made from the mean figures. None if the candidate has no endpoints."""
        training, trainer, form = self._training, candidate.trainer, candidate.form
        # The profile measured torch's own loader. All other clusters follow the rules of hetero's readers.
        is_own_loader = self._is_profiled(candidate)
        local = candidate.local_endpoints
        if is_own_loader:
            # Each rank starts equally many loader processes, so a remainder is not started.
            local -= local % training.ranks_per_host
        wanted = self._endpoints_per_host or candidate.endpoints_per_host
        counts = [
            endpoints_on(group.machine, self._figures, self._profile, wanted=wanted)[0] for group in candidate.data
        ]
        num_endpoints = local * candidate.num_trainer_hosts
        num_endpoints += sum(group.count * count for group, count in zip(candidate.data, counts, strict=True))
        if not num_endpoints:
            return None
        nbytes = bytes_per_sample(self._profile, form) * training.batch_samples
        encode_s, decode_s = codec_s(self._profile, form)
        # Without data hosts no batch travels, so none is compressed.
        encode_s = encode_s if candidate.data else 0.0
        num_ranks = training.ranks_per_host * candidate.num_trainer_hosts
        transfer_s = self._transfer_s(trainer, nbytes)
        job = TimelineJob(
            num_trainers=candidate.num_trainer_hosts,
            ranks_per_host=training.ranks_per_host,
            steps_s=training.headspace_s.values,
            relative_s=self._relative_s,
            # If the loader requests the first batches of an epoch before it begins, no step waits for them. Then epochs
            # do not matter.
            steps_per_epoch=None if training.requests_ahead else training.steps_per_epoch,
            window_batches=window_batches(trainer, num_endpoints, nbytes, num_ranks, training.ranks_per_host),
            receive_s=_value(training.receive_cpu_s_per_gb) * nbytes * 1e-9 + decode_s * training.batch_samples,
            network_s=transfer_s,
            rank_threads=math.ceil(self._rank_cores),
            is_own_loader=is_own_loader,
        )
        hosts = [self._host(trainer, local, encode_s, transfer_s)] * candidate.num_trainer_hosts
        for group, count in zip(candidate.data, counts, strict=True):
            transfer_s = self._transfer_s(group.machine, nbytes)
            hosts += [self._host(group.machine, count, encode_s, transfer_s)] * group.count
        return Timeline(job, hosts, is_long=is_long)

    def _transfer_s(self, machine: Machine, nbytes: float) -> float:
        return nbytes / float(self._figures.network_of(machine)[0])

    def _host(self, machine: Machine, num_endpoints: int, encode_s: float, sending_s: float) -> TimelineHost:
        """Return a host as the timeline needs it: its endpoints, the time of a batch, and the pace under load.

        Args:
            machine: The host's type.
            num_endpoints: Endpoints of the host.
            encode_s: CPU seconds per sample that the compression of batches costs.
            sending_s: Seconds that the network interface needs to send a batch.
        """
        cpu_s_by_share = [(share, cpu_s + encode_s) for share, cpu_s in self._figures.curve_of(machine)]
        # The first point is the cost in a process that is alone. The others are compared with this cost.
        alone_cpu_s = cpu_s_by_share[0][1]
        factors = tuple((share, cpu_s / alone_cpu_s if alone_cpu_s > 0 else 1.0) for share, cpu_s in cpu_s_by_share)
        # The second array of `costs_on` has the waits, which do not depend on the number of processes. Position 0 has
        # the mean wait.
        wait_s = float(self._figures.costs_on(machine)[1][0])
        # Divide a rank's CPU use into whole threads that use equal shares of a CPU.
        thread_share = self._rank_cores / max(1, math.ceil(self._rank_cores))
        return TimelineHost(
            num_endpoints=num_endpoints,
            batch_s=(alone_cpu_s + wait_s) * self._training.batch_samples,
            pace=functools.partial(pace, machine.vcpus, alone_cpu_s, wait_s, factors, thread_share),
            sending_s=sending_s,
        )

    def _calibrate(self) -> None:
        """Set `correction` and `residual_s` so that the timeline of the profiled cluster has the measured step time.

        Three causes of a difference are distinguished:

        - A few batches take much longer than the costs of their samples predict. The same share of slow batches is
          assumed on all hosts.
        - The accelerator limits the step of the timeline. The difference is then a cost of local loading that the
          timeline does not know, such as copies between processes. More processes do not save this cost.
        - In all other cases, the samples of the profile were cheaper or more expensive than the samples of the steps.
        """
        training = self._training
        # With data hosts, the measured steps say nothing about the trainer hosts alone.
        if training.has_data_hosts:
            return
        profiled = Candidate(
            trainer=Machine(instance_type=training.instance_type, vcpus=training.vcpus),
            num_trainer_hosts=training.num_hosts,
            local_endpoints=training.num_local_processes,
        )
        # The step time if all samples cost what single samples cost in the profile.
        expected_s = self.step_s(profiled, is_long=True)
        if expected_s is None:
            return
        if self._has_slow_batches(profiled, expected_s):
            self.correction = self._assume_slow_batches(profiled)
        # If the expected step is within 10 % of the headspace, the accelerator limits it. The measured step then says
        # nothing about the cost of samples. The difference is a cost of loading only as far as ranks waited for data.
        elif expected_s < 1.1 * training.headspace_s.mean:
            self.residual_s = min(max(0.0, training.step_s.mean - expected_s), training.data_wait_s.mean)
        else:
            # The measured steps and the measured samples are both uncertain. So correct the costs only by a part of the
            # difference, which is larger if the steps are more certain than the samples.
            self.correction = (training.step_s.mean / expected_s) ** self._weight_of_steps()

    def _has_slow_batches(self, profiled: Candidate, expected_s: float) -> bool:
        """Return whether a few batches take much longer than the costs of their samples predict.

        The signs are: the mean step takes longer than expected, and the longest step waits for data and takes much
        longer than the longest expected one.

        Args:
            profiled: The profiled cluster, which has a timeline.
            expected_s: Step time of this timeline.
        """
        steps, longest_s = self._training.step_s, max(self._training.step_s.values)
        # A mean within three standard errors may be longer by chance.
        is_longer = steps.mean > expected_s * (1 + 3 * error_of_mean(steps))
        has_long_step = longest_s > _MUCH_LONGER * self._known[profiled].longest_step_s
        has_long_wait = max(self._training.data_wait_s.values) > longest_s / 2
        return is_longer and has_long_step and has_long_wait

    def _assume_slow_batches(self, profiled: Candidate) -> float:
        """Assume as many slow batches as explain the measured step time. Return the mean cost of a batch with them.

        The cost is relative to the mean cost without slow batches. A step of the timeline takes longer with more of
        them, so bisection finds their share.
        """
        low, high = 0.0, _MAX_SLOW_SHARE
        for _ in range(_NUM_HALVINGS):
            share = (low + high) / 2
            self._assume_share(share)
            expected_s = self.step_s(profiled)
            assert expected_s is not None
            # If a step is shorter than the measured one, more batches must be slow.
            low, high = (share, high) if expected_s < self._training.step_s.mean else (low, share)
        return self._assume_share(low)

    def _assume_share(self, share: float) -> float:
        """Make this share of the batches slow in all timelines. Return the mean cost of a batch with them."""
        relative_s = self._figures.batch_shape
        # Take slow batches at equal distances in the ascending order, so short and long batches become slow alike.
        slow = np.linspace(0, len(relative_s) - 1, round(share * len(relative_s))).astype(int)
        changed = np.concatenate([np.delete(relative_s, slow), relative_s[slow] * _SLOW_FACTOR])
        self._relative_s = np.sort(changed).tolist()
        mean_cost = 1 + len(slow) / len(relative_s) * (_SLOW_FACTOR - 1)
        # A timeline divides the relative times by their mean, so slow batches would not raise the mean time. Multiply
        # the costs of samples by `mean_cost` instead. `_calibrate` stores it in `correction`, which all models use.
        self._figures.correction = mean_cost
        # Forget the step times so far, because their timelines had other batch times.
        self._known.clear()
        return mean_cost

    def _weight_of_steps(self) -> float:
        """Return the weight of the measured step time against the weight of single samples, between 0 and 1.

        Few steps, or steps of very different times, say less about the cost of a sample than many samples do.
        """
        samples = self._profile.supply[0].sample_cpu_s
        step_error = error_of_mean(self._training.step_s)
        # The mean cost of the measured samples may also differ from that of all samples, by about `SPEED_SPREAD`.
        sample_error = math.hypot(samples.variation / math.sqrt(samples.num_measured), SPEED_SPREAD)
        # Two measurements of one figure, each weighted by the inverse of its variance.
        return sample_error**2 / (sample_error**2 + step_error**2)

    def _is_profiled(self, candidate: Candidate) -> bool:
        """Return whether this is the cluster of the profile. There, processes of the ranks make the batches."""
        training = self._training
        return (
            not training.has_data_hosts
            and not candidate.data
            and candidate.form == AS_IS
            and candidate.trainer.instance_type == training.instance_type
            and candidate.num_trainer_hosts == training.num_hosts
            and candidate.local_endpoints == training.num_local_processes
        )


def window_batches(trainer: Machine, num_endpoints: int, nbytes: float, num_ranks: int, ranks_per_host: int) -> int:
    """Return how many batches of ``nbytes`` bytes the memory of a rank's window holds, at least 1.

    A reader has two limits. One is its share of the host's memory. The other is the bytes of the batches that it plans,
    and of the additional batches that a window may hold while its next batch is late.
    """
    # If the bytes of a batch are not known, they limit nothing.
    if nbytes <= 0:
        return 1 << 30
    # The rank's share of the requests to all endpoints, rounded up, and at least 2 as in `Router.planned_batches`.
    planned = max(2, -(-PREFETCH_FACTOR * num_endpoints // num_ranks))
    memory_bytes = math.inf if trainer.memory_bytes is None else trainer.memory_bytes
    limit_bytes = min(window_bytes_of(memory_bytes, ranks_per_host), planned * nbytes + WindowGrowth.MAX_BYTES)
    # A limit of exactly two batches must hold two, whatever the rounding.
    return max(1, int(limit_bytes / nbytes + 1e-9))


def _value(figure: Figure | None) -> float:
    return 0.0 if figure is None else float(figure.value)
