"""Keras' ``fit`` over `distribute`: steps are counted and measured, and end where the job is to stop."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest

from tests.support.tf.service_jobs import Job

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'tensorflow>=2.16'")

import hetero.tf  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from hetero.tf.deliveries import Deliveries  # noqa: E402

pytestmark = pytest.mark.integration


@pytest.fixture
def job(service_job: Job) -> Job:
    return service_job


def model_of(train_step_s: float = 0.0, **options: Any) -> Any:
    """Return a compiled model of a number. Its steps take at least the stated time."""

    class Slow(tf.keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            tf.numpy_function(lambda _: time.sleep(train_step_s), [data[1]], [])
            return super().train_step(data)

    model = Slow([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False, **options)
    return model


def pairs(num_batches: int, batch_s: float = 0.0) -> Any:
    """Return batches of four samples. Each batch takes the stated time to make."""

    def late(number: Any) -> Any:
        time.sleep(batch_s)
        return number

    def make(number: Any) -> Any:
        made = tf.ensure_shape(tf.numpy_function(late, [number], tf.int64), [])
        return tf.fill([4, 3], tf.cast(made, tf.float32)), tf.zeros([4, 1])

    return tf.data.Dataset.range(num_batches).map(make)


@pytest.mark.parametrize(("batch_s", "train_step_s"), [(0.4, 0.0), (0.0, 0.4)])
def test_fit_tells_waiting_from_computing(alone: Job | None, batch_s: float, train_step_s: float) -> None:
    data = hetero.tf.distribute(pairs(13, batch_s))
    begun_s = time.perf_counter()
    model_of(train_step_s).fit(data, verbose=0, shuffle=False, callbacks=[data.callback()])
    took_s = time.perf_counter() - begun_s
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (13, 52, 4)
    measured = summary.num_steps_measured
    assert 0.9 * 0.4 * (measured - 1) <= summary.total_s <= took_s
    # The first step's compute has the tracing of the model in it.
    waits, computes = summary.data_wait_p50_s, summary.step_time_p50_s - summary.data_wait_p50_s
    assert (waits > computes) == (batch_s > 0)


@pytest.mark.parametrize(("num_batches", "steps_per_execution"), [(5, 2), (6, 3)])
def test_fit_counts_every_step_of_an_execution(alone: Job | None, num_batches: int, steps_per_execution: int) -> None:
    data = hetero.tf.distribute(pairs(num_batches))
    model = model_of(steps_per_execution=steps_per_execution)
    model.fit(data.prefetch(4), epochs=2, verbose=0, shuffle=False, callbacks=[data.callback()])
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (2 * num_batches, 8 * num_batches, 4)


def test_batches_of_an_execution_that_is_longer_than_their_times_are_kept_count_too() -> None:
    deliveries = Deliveries()
    made = deliveries.behind(tf.data.Dataset.range(2 * 1500).batch(2))
    assert deliveries.read() == []
    collections.deque(made, 0)
    found = deliveries.read()
    assert [size for _, size in found] == [2] * 1500
    assert found == sorted(found)
    assert (found[0][0], found[-1][0] > 0) == (0.0, True)
    assert deliveries.read() == []


def test_fit_over_the_service_with_steps_per_epoch_and_validation(job: Job) -> None:
    numbers_only = tf.data.Dataset.range(32).map(lambda number: (tf.cast(number, tf.float32)[tf.newaxis], [0.0]))
    data = hetero.tf.distribute(numbers_only.batch(4, drop_remainder=True).repeat())
    model = model_of()
    history = model.fit(
        data,
        steps_per_epoch=3,
        epochs=3,
        validation_data=numbers_only.batch(8),
        verbose=0,
        shuffle=False,
        callbacks=[data.callback()],
    ).history
    assert len(history["val_loss"]) == 3
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples, job.num_steps) == (9, 36, 9)


def test_fit_counts_steps_that_take_several_batches(alone: Job | None) -> None:
    data = hetero.tf.distribute(pairs(6))
    taken = data.callback(batches_per_step=2)
    model_of().fit(data.unbatch().batch(8), verbose=0, shuffle=False, callbacks=[taken])
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (3, 24, 8)
    with pytest.raises(ConfigError, match="batches_per_step is 0"):
        data.callback(batches_per_step=0)


def test_fit_under_a_strategy_counts_its_steps_wherever_the_dataset_was_made(alone: Job | None) -> None:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        data = hetero.tf.distribute(pairs(6).repeat())
        model = model_of()
    model.fit(data, steps_per_epoch=3, epochs=2, verbose=0, shuffle=False, callbacks=[data.callback()])
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (6, 24)


def test_batches_that_a_strategy_cuts_for_several_processes_are_several_steps() -> None:
    data = hetero.tf.distribute(tf.data.Dataset.range(12).batch(5))
    iterator = iter(data)
    steps = data._steps
    steps.is_cut = True
    steps.begin_training(2)
    for _ in range(5):
        steps.begin_step()
        if not steps._parts:
            iterator.get_next()  # as a graph does
        steps.consume(1)
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (5, 5 + 5 + 1, 3)


def test_job_that_is_to_stop_ends_between_two_steps(job: Job) -> None:
    data = hetero.tf.distribute(pairs_of_tensorflow().repeat())
    job.stop_at = 4
    with pytest.raises(SystemExit):
        collections.deque(data, 0)
    assert data.step_timer.summary().num_steps == 3
    job.stop_at, job.num_steps = 3, 0
    model = model_of()
    with pytest.raises(SystemExit):
        model.fit(data, steps_per_epoch=9, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert int(model.optimizer.iterations) == 2


def pairs_of_tensorflow() -> Any:
    return tf.data.Dataset.range(16).map(lambda number: (tf.fill([4, 3], 1.0), tf.zeros([4, 1])))
