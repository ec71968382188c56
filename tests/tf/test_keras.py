"""`fit` over the dataset: what the model saw, and what the state says of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tf import expected

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'tensorflow>=2.16'")

import hetero.tf  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from hetero.tf.dataset import FedDataset  # noqa: E402

pytestmark = pytest.mark.integration
OPTIONS: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 11}
NUM_BATCHES = 5


class Recorder(tf.keras.Model):  # type: ignore[misc]
    """Learns nothing, and writes down the indices of the batches that its steps were given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(tf.cast(inputs["index"], tf.float32)[:, None])

    def train_step(self, data: Any) -> Any:
        tf.numpy_function(self._write_down, [data["index"]], [])
        return {"loss": tf.constant(0.0)}

    def _write_down(self, indices: Any) -> None:
        self.seen.append(indices.tolist())


class StopsAfter(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Has training end after a number of steps."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_left = num_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_left -= 1
        if not self.num_left:
            self.model.stop_training = True


def make(script: Any, **options: Any) -> FedDataset:
    return hetero.tf.from_dataset(script.tf_test_drawn(), **{**OPTIONS, **options})


def indices(first: int, last: int) -> list[list[int]]:
    """Return the indices of the batches of epochs."""
    return [batch for epoch in range(first, last + 1) for batch in expected.indices(23, epoch=epoch, **OPTIONS)]


def compiled(model: Any, **options: Any) -> Any:
    model.compile(optimizer="sgd", jit_compile=False, **options)
    return model


def place(data: FedDataset) -> tuple[Any, Any]:
    state = data.state_dict()
    return state["epoch"], state["batches"]


def test_fit_sees_every_epoch_once_and_in_order(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(0, 2)
    assert place(data) == (2, NUM_BATCHES)
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (15, 3 * 23)
    model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(0, 3)


def test_fit_without_the_callback_works_and_the_state_is_an_error(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    assert model.seen == indices(0, 1)
    with pytest.raises(ConfigError, match="the script does not report"):
        data.state_dict()


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_fit_with_steps_per_epoch_stops_and_resumes_at_any_step(
    script: Any, job: Any, steps_per_execution: int
) -> None:
    data, model = make(script), compiled(Recorder(), steps_per_execution=steps_per_execution)
    ahead = data.map(lambda batch: {"index": batch["index"]}).repeat().prefetch(4)
    stops = StopsAfter(6 // steps_per_execution)
    model.fit(ahead, steps_per_epoch=4, epochs=3, verbose=0, shuffle=False, callbacks=[data.callback(), stops])
    assert model.seen == indices(0, 1)[:6]
    assert place(data) == (1, 1)
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (6, 23 + 5, 5)

    resumed, later = make(script), compiled(Recorder(), steps_per_execution=steps_per_execution)
    resumed.load_state_dict(data.state_dict())
    later.fit(resumed.repeat(), steps_per_epoch=4, epochs=2, verbose=0, shuffle=False, callbacks=[resumed.callback()])
    assert model.seen + later.seen == indices(0, 2)[:14]
    assert place(resumed) == (2, 4)


def test_fit_of_a_resumed_pass_without_steps_per_epoch_goes_on_with_whole_epochs(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    data.load_state_dict({**data.state_dict(), "epoch": 1, "batches": 3})
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(1, 2)[3:]
    assert place(data) == (2, NUM_BATCHES)


def test_fit_passes_over_skipped_batches_once(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[data.callback()])
    data.skip_batches(2)
    model.fit(data.repeat(), steps_per_epoch=4, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(0, 0) + indices(1, 2)[2:6]
    assert place(data) == (2, 1)
    with pytest.raises(ConfigError, match="within a pass"):
        data.skip_batches(1)


def test_fit_whose_steps_take_two_batches_counts_both(script: Any, job: Any) -> None:
    data, model = make(script, drop_last=True), compiled(Recorder())
    pairs = data.map(lambda batch: batch["index"]).batch(2).map(lambda pair: {"index": tf.reshape(pair, [10])})
    taken = data.callback(batches_per_step=2)
    model.fit(pairs, epochs=1, verbose=0, shuffle=False, callbacks=[taken, StopsAfter(1)])
    first, second, *_ = indices(0, 0)
    assert model.seen == [first + second]
    assert place(data) == (0, 2)
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (1, 10)
    with pytest.raises(ConfigError, match="batches_per_step is 0, expected an integer of at least 1"):
        data.callback(batches_per_step=0)


def test_fit_over_part_of_every_epoch_counts_what_was_prefetched(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    with pytest.warns(UserWarning, match="ran out of data"):  # Keras cannot know that there are three
        model.fit(data.take(3).prefetch(4), epochs=2, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(0, 0)[:3] + indices(1, 1)[:3]
    assert place(data) == (1, 3)


def test_loop_after_fit_goes_on_where_training_ended_however_far_it_was_prefetched(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    ahead = data.map(lambda batch: {"index": batch["index"]}).repeat().prefetch(4)
    model.fit(ahead, steps_per_epoch=NUM_BATCHES, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert place(data) == (0, NUM_BATCHES)
    assert next(iter(data))["index"].numpy().tolist() == indices(1, 1)[0]


def test_fit_under_a_strategy_that_looks_ahead_counts_only_steps(script: Any, job: Any) -> None:
    data = make(script)
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = compiled(Recorder())
    model.fit(data.repeat(), steps_per_epoch=3, epochs=2, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(0, 1)[:6]
    assert place(data) == (1, 1)


def test_fit_trains_an_ordinary_model_and_validates(script: Any, job: Any) -> None:
    options = {"batch_size": 4, "drop_last": True}
    train = hetero.tf.from_dataset(script.tf_test_drawn(kind="pair"), shuffle=True, **options)
    validation = hetero.tf.from_dataset(script.tf_test_drawn(kind="pair"), **options)
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    history = model.fit(
        train, validation_data=validation, epochs=2, verbose=0, shuffle=False, callbacks=[train.callback()]
    ).history
    assert len(history["val_loss"]) == 2
    assert place(train) == (1, 5)


def test_fit_of_a_data_set_that_raises_ends_with_its_text(script: Any, job: Any) -> None:
    data = hetero.tf.from_dataset(script.tf_test_drawn(kind="broken"), batch_size=4)
    model = compiled(Recorder())
    with pytest.raises(tf.errors.OpError, match="no such file"):
        model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert place(data) == (0, 2)


def test_job_that_is_to_stop_ends_fit_between_two_steps(script: Any, job: Any) -> None:
    data, model = make(script), compiled(Recorder())
    job.stop_at = 4
    with pytest.raises(SystemExit):
        model.fit(data.prefetch(4), epochs=1, verbose=0, shuffle=False, callbacks=[data.callback()])
    assert model.seen == indices(0, 0)[:3]
    assert place(data) == (0, 3)


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    """Let iterators of a test end before the endpoints do."""
    yield
    gc.collect()


def test_steps_of_an_execution_may_be_a_variable_of_a_strategy(script: Any, job: Any) -> None:
    """As Keras 2 has them."""
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        steps = tf.Variable(2, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    data = make(script)
    callback = data.callback()
    callback.set_model(SimpleNamespace(steps_per_execution=steps))
    assert len(list(data.prefetch(1).take(4))) == 4
    callback.on_train_batch_end(0)
    assert place(data) == (0, 2)
