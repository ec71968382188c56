"""The dataset over real endpoints and real TensorFlow, in loops of a script's own."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tf import expected

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'tensorflow>=2.16'")

import hetero.tf  # noqa: E402
from hetero.audit.ledger import DIRECTORY_VARIABLE, close_current  # noqa: E402
from hetero.audit.reading import read_ledger  # noqa: E402
from hetero.control.rank.stopping import StopError  # noqa: E402
from hetero.errors import ConfigError, DatasetError  # noqa: E402
from hetero.tf.dataset import FedDataset  # noqa: E402

pytestmark = pytest.mark.integration
OPTIONS: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 11}


def make(script: Any, **options: Any) -> FedDataset:
    return hetero.tf.from_dataset(script.tf_test_drawn(), **{**OPTIONS, **options})


def plain(batch: Any) -> Any:
    """Return a batch as something that can be compared bit for bit."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(plain, batch))
    if isinstance(batch, list):
        return [item.encode() for item in batch]
    array = batch.numpy() if hasattr(batch, "numpy") else batch
    return array.tolist() if array.dtype == object else (str(array.dtype), array.shape, array.tobytes())


def epoch_of(script: Any, epoch: int, **options: Any) -> list[Any]:
    """Return the batches that one epoch must yield."""
    found = expected.batches(script.tf_test_drawn(), epoch=epoch, **{**OPTIONS, **options})
    return [plain(batch) for batch in found]


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.01)


def test_passes_are_epochs_with_the_same_bytes_as_anywhere(script: Any, job: Any) -> None:
    data = make(script)
    assert isinstance(data, tf.data.Dataset)
    assert len(data) == int(data.cardinality()) == 5
    for epoch in range(2):
        assert [plain(batch) for batch in data] == epoch_of(script, epoch)
    data.set_epoch(7)
    assert [plain(batch) for batch in data] == epoch_of(script, 7)
    assert [timer.name for timer in job.timers] == ["tf_test_drawn"]
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (15, 3 * 23)


def test_spec_is_that_of_the_batches(script: Any, job: Any) -> None:
    assert make(script).element_spec == {
        "index": tf.TensorSpec([None], tf.int64),
        "image": tf.TensorSpec([None, 4, 4, 3], tf.uint8),
        "noise": tf.TensorSpec([None, 3], tf.float32),
        "name": tf.TensorSpec([None], tf.string),
    }
    whole = make(script, drop_last=True)
    assert whole.element_spec["image"] == tf.TensorSpec([5, 4, 4, 3], tf.uint8)
    assert len(whole) == 4
    assert [plain(batch) for batch in whole] == epoch_of(script, 0, drop_last=True)


def test_state_counts_what_the_loop_has_however_far_tensorflow_is(script: Any, job: Any) -> None:
    data = make(script)
    whole = epoch_of(script, 0) + epoch_of(script, 1)
    found = []
    for batch in data:
        found.append(plain(batch))
        if len(found) == 2:
            break
    state = data.state_dict()
    assert (state["epoch"], state["batches"], len(json.dumps(state)) < 1024) == (0, 2, True)
    resumed = make(script)
    resumed.load_state_dict(state)
    assert found + [plain(batch) for batch in resumed] + [plain(batch) for batch in resumed] == whole
    assert [plain(batch) for batch in data] == whole[5:]  # after a pass that was left comes the next epoch


def test_prefetching_does_not_count(script: Any, job: Any) -> None:
    data = make(script)
    ahead = data.map(lambda batch: batch["index"]).repeat().prefetch(8)
    iterator = iter(ahead)
    found = [next(iterator).numpy().tolist()]
    wait_for(lambda: data._feed.passes._open[0].num_produced >= 5)
    with pytest.raises(ConfigError, match="the script does not report"):
        data.state_dict()
    data.mark_taken()
    for _ in range(6):
        found.append(next(iterator).numpy().tolist())
        data.mark_taken()
    state = data.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 2)
    indices = [batch for epoch in range(2) for batch in expected.indices(23, epoch=epoch, **OPTIONS)]
    assert found == indices[:7]
    resumed = make(script)
    resumed.load_state_dict(state)
    assert [batch["index"].numpy().tolist() for batch in resumed] == indices[7:]


def test_measured_loop_over_what_is_made_of_it_counts_batches_and_steps(script: Any, job: Any) -> None:
    data = make(script)
    found = [batch.numpy().tolist() for batch in data.measure(data.map(lambda batch: batch["index"]).prefetch(4))]
    assert found == list(expected.indices(23, epoch=0, **OPTIONS))
    assert (data.state_dict()["epoch"], data.state_dict()["batches"]) == (0, 5)
    for num_steps, batch in enumerate(data.measure(data.map(lambda batch: batch["index"]).prefetch(4)), start=1):
        if num_steps == 2:
            assert batch.numpy().tolist() == list(expected.indices(23, epoch=1, **OPTIONS))[1]
            break
    assert (data.state_dict()["epoch"], data.state_dict()["batches"]) == (1, 2)
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (len(found) + 2, sum(map(len, found)) + 2 * len(found[0]))


def test_measured_loop_over_a_strategy_counts_a_batch_per_replica(script: Any, job: Any) -> None:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    data = make(script)
    distributed = strategy.distribute_datasets_from_function(lambda _: data.batch(2))
    steps = sum(1 for _ in data.measure(distributed, batches_per_step=2))
    summary = data.step_timer.summary()
    assert (steps, summary.num_steps, summary.num_samples) == (-(-len(data) // 2), steps, 23)


def test_job_that_is_to_stop_ends_between_two_steps_of_a_measured_loop(script: Any, job: Any) -> None:
    data = make(script)
    job.stop_at = 3
    taken: list[Any] = []
    with pytest.raises(SystemExit):
        taken.extend(data.measure(data.prefetch(2)))
    assert data.state_dict()["batches"] == 2


def test_several_ranks_that_tensorflow_does_not_know_of_are_warned(
    script: Any, job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job, "world_size", 2)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    make(script)
    assert "the job has 2 ranks and no TF_CONFIG" in caplog.text
    caplog.clear()
    monkeypatch.setenv("TF_CONFIG", "{}")
    make(script)
    assert "TF_CONFIG" not in caplog.text


def test_measured_loop_raises_what_the_data_set_raises(script: Any, job: Any) -> None:
    data = make(script, shuffle=False, element_spec=make(script).element_spec)
    broken = hetero.tf.from_dataset(script.tf_test_drawn(kind="broken"), batch_size=5, element_spec=data.element_spec)
    with pytest.raises(DatasetError, match="no such file"):
        list(broken.measure(broken.prefetch(2)))


def test_data_set_without_samples_is_refused_where_it_is_made(script: Any, job: Any) -> None:
    spec = make(script).element_spec
    with pytest.raises(ConfigError, match="has no samples"):
        hetero.tf.from_dataset(script.tf_test_drawn(num_samples=0), batch_size=5, shuffle=True, element_spec=spec)


@pytest.mark.parametrize("num_batches", [-1, 1.0, "1"])
def test_number_of_batches_that_is_none_is_refused(script: Any, job: Any, num_batches: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_batches is {num_batches!r}, expected an integer of at least 0"):
        make(script).mark_taken(num_batches)


def test_two_iterators_do_not_disturb_each_other(script: Any, job: Any) -> None:
    data = make(script)
    first, second = iter(data), iter(data)
    pairs = [(plain(next(first)), plain(next(second))) for _ in range(3)]
    assert pairs == list(zip(epoch_of(script, 0)[:3], epoch_of(script, 1)[:3], strict=True))
    assert (data.state_dict()["epoch"], data.state_dict()["batches"]) == (1, 3)


def test_sources_of_consumed_batches_and_skipped_batches_are_reported(
    script: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close_current()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    mixture = hetero.Mixture({"a": 0.75, "b": 0.25})
    data = hetero.tf.from_dataset(script.tf_test_sources(), batch_size=4, shuffle=mixture, seed=11)
    with pytest.raises(ConfigError, match="Skip fewer batches"):
        data.skip_batches(10**6)
    with caplog.at_level(logging.INFO):
        data.skip_batches(4)
    # TensorFlow makes all batches ahead, and the loop takes three.
    for _, _batch in zip(range(3), data.measure(data.prefetch(6)), strict=False):
        pass
    close_current()
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    assert "the next pass begins 4 batches later, at batch 4" in caplog.text
    record = read_ledger(tmp_path / "ledger-rank-0.jsonl")
    assert record.notes == ["the script skipped 4 batches of loader tf_test_sources before position 4 of epoch 0"]
    assert record.entries["position"].tolist() == [4, 5, 6]
    assert (tmp_path / "ledger-rank-0.jsonl").read_text().count('"sources":{"a":3,"b":1}') == 3
    counts = {source.name: source.num_samples for source in data.step_timer.summary().by_source}
    assert counts == {"a": 9, "b": 3}


def test_torchs_loader_loads_the_state(script: Any, job: Any) -> None:
    torch_loaders = pytest.importorskip("hetero.torch", exc_type=ImportError)
    data = make(script)
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    loader = torch_loaders.DataLoader(script.tf_test_drawn(), **OPTIONS)
    loader.load_state_dict(data.state_dict())
    assert [plain(batch) for batch in loader] == epoch_of(script, 0)[3:]


def test_dataset_that_raises_is_reported_as_it_is_and_no_thread_is_left(script: Any, job: Any) -> None:
    threads = threading.active_count()
    data = hetero.tf.from_dataset(script.tf_test_drawn(kind="broken"), batch_size=4, num_workers=1)
    iterator = iter(data)
    found = [next(iterator)["index"].numpy().tolist() for _ in range(2)]
    with pytest.raises(KeyError, match="no such file") as caught:
        next(iterator)
    assert isinstance(caught.value, DatasetError)
    record: Any = caught.value.record
    assert record.sample_index == "11"
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]
    alive = weakref.ref(iterator)
    del caught, record, iterator
    assert alive() is None  # without the collector, which might drop it anywhere
    del data
    gc.collect()
    wait_for(lambda: threading.active_count() <= threads + 2)


def test_samples_that_raise_are_skipped_where_asked_for(script: Any, job: Any) -> None:
    data = hetero.tf.from_dataset(script.tf_test_drawn(kind="broken"), batch_size=4, on_sample_error="skip")
    found = [batch["index"].numpy().tolist() for batch in data]
    assert found[2] == [8, 9, 10, 8]
    assert data.step_timer.summary().num_skips == 1


def test_job_that_is_to_stop_ends_between_two_steps(script: Any, job: Any) -> None:
    data = make(script)
    job.stop_at = 4
    with pytest.raises(SystemExit):
        for _ in data:
            pass
    assert data.state_dict()["batches"] == 3


def test_job_that_is_to_stop_ends_before_a_batch_that_does_not_come(script: Any, job: Any) -> None:
    data = hetero.tf.from_dataset(script.tf_test_drawn(kind="slow"), batch_size=4)
    job.is_wait_over = True
    with pytest.raises(SystemExit):
        for _ in data:
            pass
    with pytest.raises(tf.errors.OpError, match="asked to stop"):
        list(data.map(lambda batch: batch))
    assert isinstance(job.hidden_error, StopError)


def test_batch_that_does_not_fit_is_an_error_with_what_to_do(script: Any, job: Any) -> None:
    spec = script.tf_test_drawn(kind="longer")  # samples of 3 numbers, of 4 from index 12 on
    data = hetero.tf.from_dataset(spec, batch_size=2)
    assert data.element_spec == tf.TensorSpec([None, None], tf.int64)
    narrow = hetero.tf.from_dataset(spec, batch_size=2, element_spec=tf.TensorSpec([None, 3], tf.int64))
    iterator = iter(narrow)
    assert len([next(iterator) for _ in range(6)]) == 6
    with pytest.raises(ConfigError, match=r"batch has shape \(2, 4\), expected \(None, 3\)(.|\n)*element_spec="):
        next(iterator)
    with pytest.raises(ConfigError, match=r"batch\['mask'\] is None"):
        hetero.tf.from_dataset(script.tf_test_drawn(kind="none"), batch_size=2)


def test_loop_inside_of_a_graph_works_and_is_not_counted(script: Any, job: Any) -> None:
    data = make(script)

    @tf.function
    def total() -> Any:
        result = tf.constant(0, tf.int64)
        for batch in data:
            result += tf.reduce_sum(batch["index"])
        return result

    assert int(total()) == sum(range(23))
    with pytest.raises(ConfigError, match="the script does not report"):
        data.state_dict()


def test_batch_that_keras_gets_by_next_is_not_counted(script: Any, job: Any) -> None:
    def look(iterator: Any) -> Any:
        return next(iterator)

    in_keras = types.FunctionType(
        look.__code__, {"__name__": "keras.src.trainers.trainer", "__builtins__": __builtins__}
    )
    data = make(script)
    iterator = iter(data)
    assert plain(in_keras(iterator)) == epoch_of(script, 0)[0]
    with pytest.raises(ConfigError, match="the script does not report"):
        data.state_dict()
    del iterator
    gc.collect()
    wait_for(lambda: not data._feed.passes._open)  # it was a look
    assert data.state_dict()["batches"] == 0
    assert plain(next(iter(data))) == epoch_of(script, 0)[0]


def test_pass_that_another_way_of_asking_began_is_not_counted_and_leaves_the_next_one_alone(
    script: Any, job: Any
) -> None:
    data = make(script)
    iterator = iter(data)
    assert [plain(iterator.get_next()), plain(next(iterator))] == epoch_of(script, 0)[:2]
    with pytest.raises(ConfigError, match="the script does not report"):
        data.state_dict()
    data.mark_taken(2)
    data.set_epoch(1)
    ahead = iter(data.map(lambda batch: batch["index"]))
    next(ahead)
    data.mark_taken()
    assert (data.state_dict()["epoch"], data.state_dict()["batches"]) == (1, 1)


def test_cardinality_does_not_end_a_shorter_pass(script: Any, job: Any) -> None:
    data = make(script)
    data.load_state_dict({**data.state_dict(), "epoch": 2, "batches": 3})
    assert len(data) == 5
    assert len(list(data)) == 2
    assert len(list(data)) == 5


def test_job_whose_data_hosts_make_none_of_its_batches_logs_a_warning(
    script: Any, job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(script)
    assert not caplog.messages
    monkeypatch.setattr(job.options, "data_service", "tf")
    make(script, name="train")
    assert "this host makes the batches of train, because the data hosts run tf.data.service" in caplog.text


def test_distribute_refuses_what_data_hosts_make_already(script: Any, job: Any) -> None:
    with pytest.raises(ConfigError, match="distribute was given a result of from_dataset"):
        hetero.tf.distribute(make(script).prefetch(2), placement="local")


def test_numpy_iterator_counts_too(script: Any, job: Any) -> None:
    data = make(script)
    batch = next(iter(data.as_numpy_iterator()))
    assert isinstance(batch["image"], np.ndarray)
    assert data.state_dict()["batches"] == 1


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    """Let iterators of a test end before the endpoints do."""
    yield
    gc.collect()
