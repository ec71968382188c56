"""Reports of other loaders of streams, by number: here each rank gets its share once, or an error says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero import shards
from hetero.control.rank import session as control
from hetero.errors import HeteroError
from tests.support.shards import write_shards

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from hetero.torch import DataLoader  # noqa: E402
from tests.support.streams import Buffered, Numbers, StatefulNumbers, Undivided, worker  # noqa: E402
from tests.support.torch.endpoints import ServedJob, imported_script  # noqa: E402


def loader(source: Any, guarantee: str = "exactly-once", **options: Any) -> Any:
    chosen = {"batch_size": 5, "lanes": 2, "collate_fn": list, **options}
    return DataLoader(source, guarantee=guarantee, **chosen)  # type: ignore[arg-type]


def resumed(make: Any, steps: list[int]) -> list[Any]:
    """Return the batches of one epoch that is interrupted after these numbers of steps, one after the other."""
    state, found = None, []
    for count in [*steps, None]:
        made = make()
        if state is not None:
            made.load_state_dict(state)
        for number, batch in enumerate(made):
            found.append(batch)
            if count is not None and number + 1 == count:
                break
        state = made.state_dict()
    return found


class StaleAfterLoad(StatefulNumbers):
    """Its state stays where it was loaded."""

    loaded: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.loaded is None else {"num_read": self.loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = state["num_read"]


def test_datasets_8308_third_resume_of_an_epoch_goes_on() -> None:
    def make() -> Any:
        return loader(StatefulNumbers(200))

    assert resumed(make, [3, 7, 2]) == list(make())


def test_datasets_8308_state_that_stays_after_it_was_loaded_is_named() -> None:
    with pytest.raises(HeteroError, match="gives other samples after its state"):
        list(loader(StaleAfterLoad(200)))


class WithoutShards(Numbers):
    """Worker 1 gets nothing."""

    def __iter__(self) -> Iterator[Any]:
        own, _ = worker()
        yield from () if own == 1 else ((number, 0.0) for number in range(self.num_samples))


def test_datasets_8669_worker_without_data_is_named() -> None:
    with pytest.raises(HeteroError, match="lane 1 of 2 yields nothing"):
        list(loader(WithoutShards(100), "replay"))


def test_datasets_7901_buffer_that_is_not_in_the_state_is_named_and_replayed() -> None:
    with pytest.raises(HeteroError, match="such as the buffer of a shuffle"):
        list(loader(Buffered(200)))

    def make() -> Any:
        return loader(Buffered(200), "replay", end="rest")

    whole = list(make())
    assert sorted(number for batch in whole for number, _ in batch) == list(range(200))
    assert resumed(make, [4, 5]) == whole


class Filtered(StatefulNumbers):
    """Leaves two of three numbers out, and counts the numbers that it has seen."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample[0] % 3 == 0:
                yield sample


@pytest.mark.parametrize("steps", range(1, 12))
def test_datasets_8360_8147_filter_loses_no_row_at_any_position(steps: int) -> None:
    def make() -> Any:
        return loader(Filtered(400), batch_size=7)

    assert resumed(make, [steps]) == list(make())


def test_datasets_8176_script_that_reads_parquet_ends(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "parquet", [50, 50])
    code = (
        "from hetero import shards\nfrom hetero.torch import DataLoader\n"
        f"loader = DataLoader(shards.parquet({files!r}), batch_size=10, shuffle='window', num_workers=1)\n"
        "print(len(next(iter(loader))['id']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "10\n"


def test_datasets_8253_ranks_that_do_not_divide_the_shards_all_have_rows(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "parquet", [40] * 5)
    rows = shards.parquet(files).map(lambda row: row["id"])
    options: dict[str, Any] = {"batch_size": 5, "shuffle": "window"}
    of_ranks = [
        [number for batch in DataLoader(rows, shard=(rank, 4), **options) for number in batch.tolist()]  # type: ignore[arg-type]
        for rank in range(4)
    ]
    assert [len(numbers) for numbers in of_ranks] == [50] * 4
    assert sorted(number for numbers in of_ranks for number in numbers) == list(range(200))


@pytest.mark.parametrize("is_iterated_first", [True, False])
def test_prime_rl_3332_order_of_iter_and_load_does_not_matter(is_iterated_first: bool) -> None:
    first = loader(StatefulNumbers(100))
    whole = list(loader(StatefulNumbers(100)))
    iterator = iter(first)
    for _ in range(4):
        next(iterator)
    second = loader(StatefulNumbers(100))
    iterator = iter(second) if is_iterated_first else iter(())
    second.load_state_dict(first.state_dict())
    iterator = iterator if is_iterated_first else iter(second)
    assert list(iterator) == whole[4:]


def test_lmms_engine_172_iterator_without_a_state_is_named() -> None:
    with pytest.raises(HeteroError, match="has no state_dict"):
        list(loader(Numbers(100)))


@pytest.mark.filterwarnings("ignore")  # of lightning
def test_litdata_775_lightning_restores_the_state_of_the_loader(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    seen: list[int] = []

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            seen.extend(int(number) for number, _ in batch)
            return self.layer(torch.ones(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def train(max_steps: int, **options: Any) -> None:
        plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_steps=max_steps, default_root_dir=tmp_path, **plain)
        trainer.fit(Model(), loader(StatefulNumbers(400)), **options)
        trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)

    train(7)
    train(20, ckpt_path=tmp_path / "last.ckpt")
    assert seen == [number for batch in list(loader(StatefulNumbers(400)))[:20] for number, _ in batch]


def test_energon_252_workers_start_while_threads_run() -> None:
    has_ended = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(has_ended.is_set, True)])
    thread.start()
    try:
        found = list(loader(StatefulNumbers(100), num_workers=2))
    finally:
        has_ended.set()
        thread.join()
    assert found == list(loader(StatefulNumbers(100)))


def test_torcheasyrec_544_persistent_workers_begin_at_a_state_that_comes_later() -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    whole = list(loader(StatefulNumbers(200)))
    first = loader(StatefulNumbers(200))
    iterator = iter(first)
    for _ in range(6):
        next(iterator)
    warm = loader(StatefulNumbers(200), **options)
    for _ in zip(warm, range(3), strict=False):
        pass
    warm.load_state_dict(first.state_dict())
    assert list(warm) == whole[6:]


class OfTwoShards(Numbers):
    """Workers take every n-th of two shards."""

    def __iter__(self) -> Iterator[Any]:
        own, count = worker()
        for shard in range(own, 2, count):
            yield from ((shard * 100 + number, 0.0) for number in range(100))


def test_rf_detr_1396_fewer_shards_than_ranks_are_named() -> None:
    with pytest.raises(HeteroError, match="has fewer shards than there are lanes"):
        list(loader(OfTwoShards(200), "replay", lanes=4))


def test_astropt_64_rbyte_106_lanes_that_read_the_same_stream_are_named() -> None:
    with pytest.raises(HeteroError, match="lanes 0 and 1 .* give the same samples"):
        list(loader(Undivided(100), "replay"))


SCRIPT = """
    import os
    import hetero

    class Processes:
        def __init__(self, numbers):
            self.numbers = numbers

        def hetero_split(self, lane, num_lanes):
            return Processes(self.numbers[lane::num_lanes])

        def __iter__(self):
            return iter(self.numbers)

    @hetero.dataset(collate_fn=lambda samples: [os.getpid(), *samples])
    def processes(num_samples):
        return Processes(range(num_samples))
"""


def test_torchtitan_2073_lanes_of_a_stream_are_read_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with imported_script(tmp_path, "processes_script", SCRIPT) as script:
        job = ServedJob(tmp_path, Path(script.__file__))
        job.start(3)
        monkeypatch.setattr(control, "_session", job)
        try:
            loader = DataLoader(script.processes(num_samples=300), batch_size=5, guarantee="replay", lanes=6)
            processes, deadline_s = set[int](), time.monotonic() + 100.0
            # A pass takes milliseconds. On a busy machine the first may be over before the third endpoint is connected.
            while len(processes) < 3 and time.monotonic() < deadline_s:
                batches = list(loader)
                assert sorted(number for batch in batches for number in batch[1:]) == list(range(300))
                processes |= {batch[0] for batch in batches}
        finally:
            job.stop()
            hetero.spec.set_describer(None)
    assert len(processes - {os.getpid()}) == 3
