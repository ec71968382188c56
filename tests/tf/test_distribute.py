"""`distribute` against real servers of tf.data.service: what ranks get."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.tf.service_jobs import Job, dispatcher_record

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'tensorflow>=2.16'")

import hetero.tf  # noqa: E402
from hetero.control.members.directory import Directory  # noqa: E402
from hetero.errors import ConfigError, EndpointUnavailableError  # noqa: E402
from hetero.tf import served  # noqa: E402
from hetero.tf.measured import MeasuredDataset  # noqa: E402

pytestmark = pytest.mark.integration


class Pair(NamedTuple):
    image: Any
    label: Any


@pytest.fixture
def job(service_job: Job) -> Job:
    return service_job


def on_ranks(job: Job, dataset: Any, **options: Any) -> list[MeasuredDataset]:
    """Return what each rank of two makes of a dataset. This process is one after the other."""
    job.world_size, found = 2, []
    for job.rank in range(2):
        served._num_named.clear()
        found.append(hetero.tf.distribute(dataset, **options))
    return found


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in np.atleast_1d(batch.numpy())]


def taking_turns(datasets: list[MeasuredDataset]) -> list[list[int]]:
    """Return the numbers that each dataset yields in a pass, where their readers take turns."""
    found: list[list[int]] = [[] for _ in datasets]
    reading = dict(enumerate(map(iter, datasets)))
    while reading:
        for index in list(reading):
            batch = next(reading[index], None)
            if batch is None:
                del reading[index]
            else:
                found[index] += numbers([batch])
    return found


# What ranks get


@pytest.mark.parametrize("sharding", ["dynamic", "data", "file_or_data"])
def test_each_element_goes_to_one_rank_exactly_once(job: Job, sharding: str) -> None:
    dataset = tf.data.Dataset.range(600).batch(3)
    datasets = on_ranks(job, dataset, sharding=sharding, max_outstanding_requests=2)
    for _ in range(2):
        found = taking_turns(datasets)
        assert sorted(found[0] + found[1]) == list(range(600))
        assert min(map(len, found)) > 0
    assert int(datasets[0].cardinality()) == tf.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize(("placement", "num_workers"), [("remote", 2), ("any", 3)])
def test_without_sharding_each_worker_of_the_placement_makes_every_element(
    job: Job, placement: str, num_workers: int
) -> None:
    data = hetero.tf.distribute(tf.data.Dataset.range(20), sharding="off", compression=None, placement=placement)
    assert sorted(numbers(data)) == sorted([*range(20)] * num_workers)


def test_iterator_that_is_not_read_begins_no_epoch(job: Job) -> None:
    datasets = on_ranks(job, tf.data.Dataset.range(200))
    looked = [iter(datasets[0]) for _ in range(3)]  # Keras makes some on one rank that it does not make on others
    found = taking_turns(datasets)
    assert sorted(found[0] + found[1]) == list(range(200))
    del looked


def test_pass_after_one_that_was_left_is_a_whole_one(job: Job) -> None:
    data = hetero.tf.distribute(tf.data.Dataset.range(50).batch(5), name="train")
    for num_batches, _ in enumerate(data, start=1):
        if num_batches == 3:
            break
    assert sorted(numbers(data)) == list(range(50))
    summary = data.step_timer.summary()
    assert (summary.name, summary.num_samples) == ("train", 15 + 50)


def test_repeat_before_makes_it_infinite_and_behind_gives_more_passes(job: Job) -> None:
    twice = hetero.tf.distribute(tf.data.Dataset.range(10)).repeat(2)
    assert sorted(numbers(twice)) == sorted([*range(10)] * 2)
    endless = hetero.tf.distribute(tf.data.Dataset.range(10).repeat())
    assert int(endless.cardinality()) == int(endless.prefetch(2).cardinality()) == tf.data.INFINITE_CARDINALITY
    found = numbers(endless.take(40))
    assert len(found) == 40
    assert set(found) == set(range(10))


def test_datasets_of_one_name_and_of_other_generations_are_jobs_of_their_own(job: Job) -> None:
    datasets = [hetero.tf.distribute(tf.data.Dataset.range(size)) for size in (3, 5)]
    job.generation = 1
    served._num_named.clear()
    datasets.append(hetero.tf.distribute(tf.data.Dataset.range(7)))
    assert [len(numbers(data)) for data in datasets] == [3, 5, 7]


def test_coordinated_ranks_get_consecutive_elements_in_every_round(job: Job) -> None:
    datasets = on_ranks(job, tf.data.Dataset.range(10**6).repeat(), sharding="off", coordinated=True)
    found: list[list[int]] = [[], []]

    def read(rank: int) -> None:  # a rank waits for the other one
        found[rank] = numbers(datasets[rank].take(20))

    threads = [threading.Thread(target=read, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    assert [len(each) for each in found] == [20, 20]
    assert [second - first for first, second in zip(*found, strict=True)] == [1] * 20


def test_elements_of_any_structure_come_through(job: Job) -> None:
    element = {"image": np.arange(6, dtype=np.uint8).reshape(1, 2, 3), "name": np.array([b"one"])}
    dataset = tf.data.Dataset.from_tensor_slices(element).batch(1, drop_remainder=True)
    data = hetero.tf.distribute(dataset)
    assert data.element_spec == dataset.element_spec
    (batch,) = data
    assert batch["image"].numpy().tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert batch["name"].numpy().tolist() == [b"one"]


# Without data hosts


DATASETS = {
    "tensor": lambda: tf.data.Dataset.range(7).batch(3),
    "dict": lambda: tf.data.Dataset.from_tensor_slices(
        {"image": np.zeros((5, 2), np.uint8), "label": np.arange(5)}
    ).batch(2),
    "tuple": lambda: tf.data.Dataset.from_tensor_slices((np.arange(4), [b"a", b"b", b"c", b"d"])),
    "namedtuple": lambda: tf.data.Dataset.range(3).map(lambda number: Pair(number[tf.newaxis], number)),
    "none": lambda: tf.data.Dataset.range(3).map(lambda number: (number, None)),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [], [3]])).batch(2),
    "sparse": lambda: tf.data.Dataset.from_tensor_slices(tf.sparse.eye(4)).batch(2),
    "unknown": lambda: tf.data.Dataset.range(3).filter(lambda number: number > 0),
    "infinite": lambda: tf.data.Dataset.range(3).repeat(),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_alone_the_elements_are_those_of_the_dataset(alone: Job | None, kind: str) -> None:
    dataset = DATASETS[kind]()
    data = hetero.tf.distribute(dataset, max_outstanding_requests=3)
    assert isinstance(data, tf.data.Dataset)
    assert data.element_spec == dataset.element_spec
    assert int(data.cardinality()) == int(dataset.cardinality())
    wanted, found = [], []
    for batches, texts in ((dataset.take(4), wanted), (data.take(4), found)):
        texts += [str(tf.nest.flatten(batch, expand_composites=True)) for batch in batches]
    assert found == wanted
    assert wanted


def test_local_placement_keeps_the_dataset_in_this_process(job: Job) -> None:
    job.options.data_service = "grpc"  # nor does it need tf.data.service
    dataset = tf.data.Dataset.range(3).map(lambda number: tf.numpy_function(np.negative, [number], tf.int64))
    assert numbers(hetero.tf.distribute(dataset, placement="local")) == [0, -1, -2]


# What is measured


def test_loop_counts_and_measures_its_steps(job: Job) -> None:
    data = hetero.tf.distribute(tf.data.Dataset.range(10).batch(4).repeat(), sharding="off", name="train")
    iterator = iter(data)
    samples = sum(len(next(iterator)) for _ in range(9))
    summary = data.step_timer.summary()
    assert [timer.name for timer in job.timers] == ["train"]
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (9, samples, 4)
    assert (summary.num_steps_measured, job.num_steps) == (8, 9)
    assert summary.total_s == pytest.approx(summary.compute_total_s + summary.data_wait_total_s)


def test_loop_over_a_dataset_made_of_it_is_measured_where_asked_for(alone: Job | None) -> None:
    data = hetero.tf.distribute(tf.data.Dataset.range(10).batch(4))
    assert numbers(data.measure(data.map(lambda batch: -batch).prefetch(2))) == [-number for number in range(10)]
    assert numbers(data.measure(data)) == list(range(10))
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    assert numbers(data.measure(strategy.experimental_distribute_dataset(data))) == list(range(10))
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (9, 30)


# What is refused


def test_datasets_that_cannot_work_are_refused(alone: Job | None) -> None:
    with pytest.raises(ConfigError, match="was given a range, expected a tf.data.Dataset"):
        hetero.tf.distribute(range(3))
    data = hetero.tf.distribute(tf.data.Dataset.range(3))
    for made in (data, data.prefetch(1), tf.data.Dataset.range(3).concatenate(data.batch(2).unbatch())):
        with pytest.raises(ConfigError, match="given a result of distribute"):
            hetero.tf.distribute(made)
    with pytest.raises(ConfigError, match=r"dataset of 3 elements, expected an infinite one(.|\n)*\.repeat\(\)"):
        hetero.tf.distribute(tf.data.Dataset.range(3), coordinated=True)
    with pytest.raises(ConfigError, match="inside a tf.function"):
        tf.function(lambda: hetero.tf.distribute(tf.data.Dataset.range(3)) and tf.no_op(), autograph=False)()


def test_python_in_a_dataset_is_refused_before_anything_is_contacted(job: Job) -> None:
    job.tf_servers.replace([])

    def nested(number: Any) -> Any:
        return tf.data.Dataset.from_tensors(number).map(lambda one: tf.py_function(lambda: 1, [], tf.int64))

    generator = tf.data.Dataset.from_generator(lambda: iter(range(3)), output_signature=tf.TensorSpec([], tf.int64))
    for dataset in (generator.batch(2), tf.data.Dataset.range(3).interleave(nested)):
        with pytest.raises(ConfigError, match=r"runs Python \((Eager)?PyFunc\)(.|\n)*hetero.tf.from_dataset"):
            hetero.tf.distribute(dataset)


def test_datasets_as_elements_are_refused_before_anything_is_contacted(job: Job) -> None:
    job.tf_servers.replace([])
    windows = tf.data.Dataset.range(6).window(2)
    for dataset in (windows, windows.map(lambda window: (1, {"window": window}))):
        with pytest.raises(ConfigError, match=r"elements of the dataset contain datasets(.|\n)*flat_map"):
            hetero.tf.distribute(dataset)
        assert len(list(hetero.tf.distribute(dataset, placement="local"))) == 3


def zipped() -> Any:
    numbers_of = tf.data.Dataset.range(40)
    return tf.data.Dataset.zip((numbers_of.map(lambda number: -number), numbers_of)).batch(2)


@pytest.mark.parametrize("make", [zipped, lambda: tf.data.Dataset.range(3).enumerate()], ids=["zip", "enumerate"])
def test_datasets_that_dynamic_sharding_would_pair_wrongly_are_refused(job: Job, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"zips several sources(.|\n)*from_tensor_slices(.|\n)*sharding='data'"):
        hetero.tf.distribute(make())


def test_datasets_that_are_zipped_elsewhere_or_not_divided_keep_their_pairs(job: Job) -> None:
    for sharding in ("data", "off"):
        data = hetero.tf.distribute(zipped(), sharding=sharding)
        assert all((first == -second).all() for first, second in data.as_numpy_iterator())
    data = hetero.tf.distribute(tf.data.Dataset.range(4).interleave(lambda _: zipped()))
    assert all((first == -second).all() for first, second in data.as_numpy_iterator())


def test_dataset_that_is_the_part_of_a_rank_is_refused(job: Job) -> None:
    job.world_size, job.rank = 3, 1
    hetero.tf.distribute(tf.data.Dataset.range(9).shard(3, 0).shard(2, 1))
    hint = tf.data.experimental.SHARD_HINT
    hetero.tf.distribute(tf.data.Dataset.range(9).shard(hint, hint), sharding="hint")
    with pytest.raises(ConfigError, match="of rank 1 is shard 1 of 3, expected the whole dataset"):
        hetero.tf.distribute(tf.data.Dataset.range(9).shard(3, job.rank).batch(2))


def test_datasets_that_differ_between_ranks_are_refused(job: Job) -> None:
    hetero.tf.distribute(tf.data.Dataset.range(3))
    served._num_named.clear()  # another rank
    with pytest.raises(ConfigError, match="differs between ranks(.|\n)*TensorFlow reports"):
        hetero.tf.distribute(tf.data.Dataset.range(3).batch(2))


def test_dispatcher_is_waited_for_within_bounds(job: Job, address: str) -> None:
    job.tf_servers.replace([])
    job.options.data_timeout_s = 0.2
    with pytest.raises(EndpointUnavailableError, match=r"no dispatcher of tf.data.service(.|\n)*first data host"):
        hetero.tf.distribute(tf.data.Dataset.range(3))
    job.options.data_timeout_s = 60.0

    class Late(Directory):
        """Told once somebody listens."""

        def subscribe(self, listener: Any) -> Any:
            unsubscribe = super().subscribe(listener)
            threading.Timer(0.1, self.replace, [[dispatcher_record(address)]]).start()
            return unsubscribe

    job.tf_servers = Late()
    assert sorted(numbers(hetero.tf.distribute(tf.data.Dataset.range(3)))) == [0, 1, 2]


# How it ends


def test_process_ends_although_iterators_are_open(address: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import tensorflow as tf
import hetero.tf
from hetero.control.rank import session as control
from tests.support.tf import service_jobs

if __name__ == "__main__":
    control._session = job = service_jobs.Job("tf")
    job.job_id = "left open"
    job.tf_servers.replace([service_jobs.dispatcher_record({address!r})])
    data = hetero.tf.distribute(tf.data.Dataset.range(100).batch(4).repeat())
    iterators = [iter(data), iter(data.prefetch(8))]
    print([len(next(each)) for each in iterators], flush=True)
"""
    )
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "[4, 4]\n"
        assert child.wait(300.0) == 0
    finally:
        child.kill()
        child.communicate()
