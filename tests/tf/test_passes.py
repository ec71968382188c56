"""Stages of a pass, and states of the script's reports. Without TensorFlow, threads and clocks."""

from __future__ import annotations

import dataclasses

import pytest

from hetero.errors import ConfigError
from hetero.loaders.auditing import Record
from hetero.loaders.sampling import BuiltInOrder, Shard
from hetero.loaders.state import Progress
from hetero.tf.passes import Claim, PassLog, ProducedBatch, Reporting, Stage, TensorFlowPass

NEVER, ANNOUNCED, REPORTING, PAUSED = Reporting


@dataclasses.dataclass
class Trial:
    """A log of passes of five batches. The test plays TensorFlow and the script."""

    num_batches: int = 5

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.log = PassLog(self.progress)

    def begin(self, num_produced: int = 0) -> TensorFlowPass:
        order = BuiltInOrder(num_samples=2 * self.num_batches, batch_size=2, seed=3)
        begun = self.log.begin(order, Shard(0, 1))
        self.produce(begun, num_produced)
        return begun

    def produce(self, tf_pass: TensorFlowPass, num_batches: int) -> None:
        for _ in range(num_batches):
            tf_pass.produce(ProducedBatch(2, Record(), tf_pass.start.batches + tf_pass.num_produced + 1))

    def claimed(self, num_produced: int) -> TensorFlowPass:
        claim = Claim()
        self.log.expect(claim)
        begun = self.begin(num_produced)
        assert claim.tf_pass is begun
        return begun

    def ended(self, num_produced: int) -> TensorFlowPass:
        begun = self.begin(num_produced)
        self.log.end(begun)
        return begun

    def place(self) -> tuple[int, int]:
        start = self.progress.position()
        return start.epoch, start.batches


@pytest.mark.parametrize(
    ("state", "after_announcement", "after_report", "after_training"),
    [
        (NEVER, ANNOUNCED, REPORTING, NEVER),
        (ANNOUNCED, ANNOUNCED, REPORTING, ANNOUNCED),
        (REPORTING, REPORTING, REPORTING, PAUSED),
        (PAUSED, PAUSED, REPORTING, PAUSED),
    ],
)
def test_reporting_changes_with_announcements_reports_and_the_end_of_training(
    state: Reporting, after_announcement: Reporting, after_report: Reporting, after_training: Reporting
) -> None:
    events = {
        PassLog.announce_reports: after_announcement,
        PassLog.end_training: after_training,
        PassLog.begin_training: REPORTING,
    }
    for event, after in events.items():
        log = Trial().log
        log._reporting = state
        event(log)
        assert log._reporting is after
    log._reporting = state
    log.report(0)
    assert log._reporting is after_report


def test_what_counts_a_pass_is_fixed_when_it_begins() -> None:
    trial = Trial()
    before, counted = trial.begin(), trial.claimed(1)
    trial.log.announce_reports()
    after = trial.begin()
    found = [(each.is_counted, each.is_announced) for each in (before, counted, after)]
    assert found == [(False, False), (True, False), (False, True)]


def test_running_pass_whose_batches_are_all_consumed_is_closed() -> None:
    trial = Trial()
    running = trial.begin(5)
    for _ in range(5):
        assert running.stage is Stage.RUNNING
        assert len(trial.log.report(1)) == 1
    assert running.stage is Stage.CLOSED
    assert trial.place() == (0, 5)


def test_running_pass_that_ends_before_it_happened_is_void() -> None:
    trial = Trial()
    assert trial.ended(2).stage is Stage.VOID
    assert trial.begin().start.epoch == 0


def test_running_pass_that_ends_after_its_only_produced_batch_is_closed() -> None:
    trial = Trial()
    trial.log.report(0)
    running = trial.begin(1)
    trial.log.report(1)
    trial.log.end(running)
    assert running.stage is Stage.CLOSED
    assert trial.place() == (0, 1)
    assert trial.begin().start.epoch == 1


@pytest.mark.parametrize("reason", ["reports", "complete", "failure"])
def test_running_pass_that_ends_with_batches_to_report_has_ended_and_is_closed_by_the_last_report(reason: str) -> None:
    trial = Trial()
    if reason == "reports":
        trial.log.begin_training()
    running = trial.begin(5 if reason == "complete" else 2)
    if reason == "failure":
        running.failure = ConfigError("no element")
    trial.log.end(running)
    assert running.stage is Stage.ENDED
    num_reported = len(trial.log.report(9))
    assert num_reported == (5 if reason == "complete" else 2)
    assert running.stage is Stage.CLOSED
    assert trial.place() == (0, num_reported)


def test_void_pass_whose_batches_are_reported_later_has_ended_and_did_happen() -> None:
    trial = Trial()
    void = trial.ended(2)
    assert void.stage is Stage.VOID
    assert len(trial.log.report(1)) == 1
    assert void.stage is Stage.ENDED
    assert trial.begin().start.epoch == 1


@pytest.mark.parametrize(
    ("num_produced", "num_consumed", "is_announced", "stage"),
    [
        (3, 1, True, Stage.CLOSED),  # it has happened, and the rest will not be reported
        (5, 0, False, Stage.CLOSED),  # an epoch that the script does not report
        (5, 0, True, Stage.VOID),  # TensorFlow only looked at it
        (3, 0, False, Stage.VOID),
    ],
)
@pytest.mark.parametrize("has_ended", [False, True])
def test_training_that_begins_or_ends_leaves_no_pass_open(
    num_produced: int, num_consumed: int, is_announced: bool, stage: Stage, has_ended: bool
) -> None:
    for ends_too in (False, True):
        trial = Trial()
        if is_announced:
            trial.log.begin_training()
        found = trial.begin(num_produced)
        trial.log.report(num_consumed)
        if has_ended:
            trial.log.end(found)
        trial.log.end_training() if ends_too else trial.log.begin_training()
        assert found.stage is stage
        assert trial.begin().start.epoch == (stage is Stage.CLOSED)


def test_training_does_not_close_the_pass_that_an_iterator_counts() -> None:
    trial = Trial()
    counted = trial.claimed(2)
    trial.log.begin_training()
    trial.log.end_training()
    assert counted.stage is Stage.RUNNING
    assert not trial.log.has_unreported()
    trial.log.consume(counted)
    assert trial.place() == (0, 1)


def test_forgotten_pass_is_closed_and_changes_no_place() -> None:
    trial = Trial()
    running, other = trial.begin(2), trial.claimed(2)
    trial.progress.set_epoch(7)
    trial.log.forget()
    assert (running.stage, other.stage) == (Stage.CLOSED, Stage.CLOSED)
    assert trial.log.report(1) == []
    assert trial.log.consume(other).size == 2
    assert trial.place() == (7, 0)
    assert trial.begin().start.epoch == 7


def test_pass_without_batches_is_closed_when_it_ends_and_counts_as_an_epoch() -> None:
    trial = Trial(num_batches=0)
    assert trial.ended(0).stage is Stage.CLOSED
    assert trial.place() == (0, 0)
    assert trial.begin().start.epoch == 1


def test_place_and_end_are_of_the_last_batch_if_this_rank_has_no_batch_in_some_steps() -> None:
    trial = Trial(num_batches=99)
    running = trial.begin()
    for batches in (1, 2, 4, 7):
        running.produce(ProducedBatch(2, Record(), batches))
    trial.log.report(3)
    assert trial.place() == (0, 4)
    running.end_here()
    assert running.stage is Stage.RUNNING
    trial.log.report(1)
    assert (running.stage, trial.place()) == (Stage.CLOSED, (0, 7))


def test_unreported_passes_are_closed_beyond_a_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.tf.passes._MAX_UNREPORTED", 7)
    trial = Trial()
    first, second = trial.begin(4), trial.begin(5)
    third = trial.begin()
    assert [each.stage for each in (first, second, third)] == [Stage.CLOSED, Stage.RUNNING, Stage.RUNNING]
    trial.log.end(first)
    assert first.stage is Stage.VOID  # it ended before it happened


def test_place_is_not_known_before_the_first_report() -> None:
    trial = Trial()
    trial.log.check_is_reported()
    trial.claimed(1)
    trial.log.check_is_reported()
    trial.begin(1)
    with pytest.raises(ConfigError, match=r"does not report which batches(.|\n)*mark_taken"):
        trial.log.check_is_reported()
    trial.log.announce_reports()
    with pytest.raises(ConfigError, match="does not report"):
        trial.log.check_is_reported()
    trial.log.report(0)
    trial.log.check_is_reported()
