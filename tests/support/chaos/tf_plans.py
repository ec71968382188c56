"""Which jobs `tf_jobs` runs: what feeds them, what befalls them and when, and how each has to end. All by a seed."""

from __future__ import annotations

import enum
import itertools
import random
from dataclasses import dataclass, replace

from hetero.errors import ExitCode

NUM_RANKS = 2
BATCH_SIZE = 4
DATA_TIMEOUT_S, SHORT_DATA_TIMEOUT_S = 120.0, 8.0
LEASE_S = 15.0
"""Seconds until a silent host counts as lost."""
_END_S = 10.0
"""Promised seconds from the end, or from the fault that ended the job, until every host is gone."""
_SILENT_S = 60.0
"""Promised: the same from when a host has fallen silent, and from SIGTERM."""
_MAX_STEP = 15
"""The last step of a fault."""


class Fault(enum.Enum):
    """What befalls a job."""

    EXCEPTION = "exception in a rank"
    TERM_JOB = "SIGTERM to the job"
    TERM_TRAINER = "SIGTERM to a trainer launcher"
    KILL_RANK = "SIGKILL of a rank"
    KILL_SERVER = "SIGKILL of a worker"
    KILL_DISPATCHER = "SIGKILL of the dispatcher"
    KILL_TRAINER = "SIGKILL of a trainer launcher"
    KILL_DATA = "SIGKILL of a data launcher"


_EARLY_S = {
    Fault.EXCEPTION: 0.0,  # before the first step
    Fault.TERM_JOB: 12.0,
    Fault.TERM_TRAINER: 8.0,
    Fault.KILL_RANK: 4.0,
    Fault.KILL_SERVER: 3.0,
}
"""What may befall a job that has not begun to train, and at most how long after its process is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job."""

    service: str
    """What makes the batches: tf.data.service by `hetero.tf.distribute` (tf), or endpoints by `from_dataset` (grpc)."""
    num_data: int
    """Data hosts, 1 or 2, each with one worker or endpoint."""
    num_trainers: int
    """Trainer hosts, 1 or 2, that share the two ranks."""
    is_repeated: bool = False
    """Whether the dataset is repeated without end. The script then leaves it after some steps."""
    has_work_dir: bool = False
    """Whether the dispatcher keeps a journal."""
    fault: Fault | None = None
    victim: int = 0
    """Which rank, trainer host or data host it befalls."""
    at_step: int = 0
    """Step of the fault. 0: before the first step, ``after_s`` after the start of the victim's process."""
    after_s: float = 0.0

    @property
    def data_hosts(self) -> list[str]:
        """Their names."""
        return [f"algo-{number}" for number in range(1, self.num_data + 1)]

    @property
    def trainer_hosts(self) -> list[str]:
        """Their names."""
        return [f"algo-{number}" for number in range(self.num_data + 1, self.num_data + self.num_trainers + 1)]

    @property
    def loses_pass(self) -> bool:
        """Whether a pass of tf.data.service that has an end waits for it, as a worker is lost for good."""
        return self.fault is Fault.KILL_DATA and self.service == "tf" and not self.is_repeated

    @property
    def loses_data(self) -> bool:
        """Whether what is left cannot make the batches that are still to come, or say who makes them."""
        is_all = self.num_data == 1 or (self.service == "tf" and self.victim == 0)
        return self.fault is Fault.KILL_DATA and (is_all or self.loses_pass)

    @property
    def leaves_journal(self) -> bool:
        """Whether the dispatcher's journal is left. The next job with a journal removes it."""
        return self.has_work_dir and self.fault is Fault.KILL_DATA and self.victim == 0

    @property
    def exit_code(self) -> int:
        """How the job has to end, as docs/jobs.md and docs/tensorflow.md say."""
        if self.fault in (Fault.EXCEPTION, Fault.KILL_RANK):
            return ExitCode.SCRIPT_FAILED
        if self.fault in (Fault.TERM_JOB, Fault.TERM_TRAINER):
            return 143
        if self.fault is Fault.KILL_DISPATCHER and not self.has_work_dir:
            return ExitCode.DATA_PLANE_LOST
        if self.fault is Fault.KILL_TRAINER:
            return 137 if self.victim == 0 else ExitCode.ORPHANED  # the job's is that of the first trainer host
        return ExitCode.DATA_PLANE_LOST if self.loses_data else 0

    @property
    def data_timeout_s(self) -> float:
        """What the job may be without data."""
        return SHORT_DATA_TIMEOUT_S if self.loses_data else DATA_TIMEOUT_S

    @property
    def bound_s(self) -> float:
        """Promised from the end of the ranks, or from the fault if that is the end, until everything is gone."""
        # The clients of a lost dispatcher call again after pauses that grow with the time.
        if self.fault in (Fault.TERM_JOB, Fault.TERM_TRAINER, Fault.KILL_TRAINER, Fault.KILL_DISPATCHER):
            return _SILENT_S
        noticed_s = LEASE_S if self.fault is Fault.KILL_DATA else 0.0  # until then it is waited for at the end, too
        return _END_S + noticed_s + (self.data_timeout_s if self.loses_data else 0.0)

    @property
    def num_elements(self) -> int:
        """Of the dataset: some more than can be used up before a fault ends the job, if that does not need the end."""
        if self.exit_code != 0 and not self.loses_pass:
            return 40_000
        return BATCH_SIZE * NUM_RANKS * self.num_steps

    @property
    def num_steps(self) -> int:
        """Of each rank, in a job that is to end by itself."""
        return 80 if self.fault else 20

    def describe(self) -> str:
        """Return all of it in a line."""
        words = [
            self.service,
            f"{self.num_data} data",
            f"{self.num_trainers} trainer",
            "repeated" if self.is_repeated else "finite",
        ]
        if self.has_work_dir:
            words.append("journal")
        if self.fault is None:
            return ", ".join(words)
        when = f"at step {self.at_step}" if self.at_step else f"early ({self.after_s:.1f} s)"
        return f"{', '.join(words)}: {self.fault.value} ({self.victim}) {when}"


def draw(num_jobs: int, seed: int, faults: tuple[Fault, ...] = tuple(Fault)) -> list[Plan]:
    """Return the plans of jobs in a row, a third of them with a fault, of each kind about as many.

    Args:
        num_jobs: How many.
        seed: Of all that is drawn.
        faults: The kinds. If given, all jobs have one.
    """
    chance = random.Random(seed)
    num_faults = round(num_jobs / 3) if faults == tuple(Fault) else num_jobs
    harmed = set(chance.sample(range(num_jobs), num_faults))
    kinds = itertools.chain.from_iterable(chance.sample(faults, len(faults)) for _ in itertools.count())
    num_of_kind = dict.fromkeys(Fault, 0)
    plans = []
    for number in range(num_jobs):
        plan = Plan(
            service="grpc" if number % 3 == 2 else "tf",
            num_data=chance.choice((1, 2)),
            num_trainers=chance.choice((1, 2)),
            is_repeated=number % 2 == 1,
        )
        plan = replace(plan, has_work_dir=plan.service == "tf" and chance.random() < 0.5)
        if number in harmed:
            kind = next(kinds)
            plan = _harmed(plan, kind, chance, num_of_kind[kind])
            num_of_kind[kind] += 1
        plans.append(plan)
    return plans


def _harmed(plan: Plan, fault: Fault, chance: random.Random, num_before: int) -> Plan:
    """Return a plan with a fault of a kind that other plans have too."""
    if fault is Fault.KILL_DISPATCHER:  # by turns
        plan = replace(plan, service="tf", has_work_dir=num_before % 2 == 1)
    if fault is Fault.KILL_TRAINER:
        plan = replace(plan, num_trainers=2)
    victims = {
        Fault.KILL_DISPATCHER: 1,
        Fault.TERM_JOB: 1,
        Fault.TERM_TRAINER: plan.num_trainers,
        Fault.KILL_TRAINER: plan.num_trainers,
        Fault.KILL_SERVER: plan.num_data,
        Fault.KILL_DATA: plan.num_data,
    }
    victim = num_before % victims.get(fault, NUM_RANKS)
    is_early = chance.random() < 1 / 3 and fault in _EARLY_S
    step, after_s = chance.randint(1, _MAX_STEP), chance.uniform(0.0, _EARLY_S.get(fault, 0.0))
    if is_early:
        return replace(plan, fault=fault, victim=victim, after_s=after_s)
    return replace(plan, fault=fault, victim=victim, at_step=step)
