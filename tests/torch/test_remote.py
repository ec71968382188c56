"""The loader with real endpoints: the same bytes as without, however many there are."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import hetero
from hetero.control.rank import session as control
from hetero.errors import ConfigError, DatasetError
from hetero.loaders import pipeline, remote
from hetero.torch import DataLoader
from hetero.wire import compression
from tests.support.torch.endpoints import ServedJob, imported_script
from tests.support.torch.loaders import rebuilt_by_tool
from tests.support.waiting import wait_for

SCRIPT = """
    import random

    import numpy as np
    import torch

    import hetero

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 37

        def __getitem__(self, index):
            if isinstance(index, str):
                return f"text {index}", random.random()
            if index == 36 and self.broken:
                raise KeyError("no such file")
            image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
            mask = torch.zeros(500)
            return {"image": image, "noise": np.random.rand(4), "label": index, "name": f"sample {index}", "mask": mask}

    @hetero.dataset
    def remote_test_noisy(broken=False):
        data = Noisy()
        data.broken = broken
        return data

    def keep(samples):
        return samples

    @hetero.dataset(collate_fn=keep)
    def remote_test_kept():
        data = Noisy()
        data.broken = False
        return data
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The script's data sets, in this process too."""
    with imported_script(tmp_path_factory.mktemp("script"), "remote_test_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def served(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], ServedJob]]:
    """Return a function that starts so many endpoints, or returns those that are there."""
    threads = threading.active_count()
    jobs: dict[int, ServedJob] = {}

    def start(num_endpoints: int) -> ServedJob:
        if num_endpoints not in jobs:
            job = jobs[num_endpoints] = ServedJob(
                tmp_path_factory.mktemp("served"), Path(script.__file__), purity_checks=2
            )
            job.start(num_endpoints)
        return jobs[num_endpoints]

    yield start
    for job in jobs.values():
        job.stop()
    wait_for(lambda: threading.active_count() <= threads)


@pytest.fixture
def job(served: Callable[[int], ServedJob], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], ServedJob]]:
    """Return a function that makes loaders fetch from so many endpoints."""

    def join(num_endpoints: int) -> ServedJob:
        job = served(num_endpoints)
        job.timers.clear()
        monkeypatch.setattr(control, "_session", job)
        monkeypatch.setattr(pipeline, "_num_verified", {})
        return job

    yield join
    ServedJob.disconnect()
    hetero.spec.set_describer(None)


def update(chain: Any, value: Any) -> None:
    """Hash a nested batch, types included."""
    chain.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        chain.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            update(chain, key)
            update(chain, item)
    elif isinstance(value, list | tuple):
        for item in value:
            update(chain, item)
    elif hasattr(value, "tobytes"):
        chain.update(value.tobytes())
    else:
        chain.update(repr(value).encode())


def digest(*passes: Any) -> str:
    chain = hashlib.sha256()
    for batches in passes:
        for batch in batches:
            update(chain, batch)
    return chain.hexdigest()


def everything(script: Any) -> list[str]:
    """Digests of all that the loader can do: the same for every placement."""
    train = DataLoader(script.remote_test_noisy(), batch_size=4, shuffle=True, seed=3, num_workers=0)
    digests = [digest(train, train)]
    validation = DataLoader(script.remote_test_noisy(), batch_size=5)
    together = zip(train, validation, strict=False)  # two loaders, two passes of one at the same time
    digests.append(digest(([a, b, c] for (a, b), c in zip(together, train, strict=False))))
    for _ in train:  # left early
        break
    state = train.state_dict()
    resumed = DataLoader(script.remote_test_noisy(), batch_size=4, shuffle=True, seed=3, prefetch_factor=3)
    resumed.load_state_dict(state)
    digests.append(digest(resumed))
    digests.append(digest(DataLoader(script.remote_test_noisy(), batch_size=None)))
    keys: Any = [["a", "b"], ["a"]]
    digests.append(digest(DataLoader(script.remote_test_noisy(), batch_sampler=keys)))
    digests.append(digest(DataLoader(script.remote_test_kept(), batch_size=3)))
    sampler = torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0], 20)
    digests.append(digest(DataLoader(script.remote_test_noisy(), batch_size=6, sampler=sampler)))
    rebuilt: Any = rebuilt_by_tool(validation)
    digests.append(digest(rebuilt))
    return digests


@pytest.mark.integration
def test_loader_bytes_do_not_depend_on_the_number_of_endpoints(script: Any, job: Any) -> None:
    expected = everything(script)
    assert len(set(expected)) == len(expected)
    for num_endpoints in (1, 2):
        running = job(num_endpoints)
        assert everything(script) == expected
        assert {timer.name for timer in running.timers} == {"remote_test_noisy", "remote_test_kept"}
        running.disconnect()


@pytest.mark.integration
def test_loader_with_endpoints_prefetches_names_failures_and_needs_no_data_here(script: Any, job: Any) -> None:
    running = job(2)
    assert len(script.remote_test_noisy()) == len(DataLoader(script.remote_test_noisy())) == 37
    fleet = remote.fleet_for(running)
    assert fleet.limits.max_batch_bytes == running.options.max_batch_bytes

    loader = DataLoader(script.remote_test_noisy(), batch_size=4, num_workers=4, persistent_workers=True)
    rebuilt: Any = rebuilt_by_tool(
        loader,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    for batches in (loader, rebuilt):
        before = fleet.stats.batches
        iterator = iter(batches)
        next(iterator)
        wait_for(lambda before=before: fleet.stats.batches >= before + 3)
        del iterator

    broken = iter(DataLoader(script.remote_test_noisy(broken=True), batch_size=4))
    for _ in range(9):
        next(broken)
    with pytest.raises(DatasetError, match="no such file") as caught:
        next(broken)
    record: Any = caught.value.record
    assert (record.host, record.sample_index) in {("algo-1/0", "36"), ("algo-1/1", "36")}


@pytest.mark.integration
def test_loader_compression_changes_no_byte_and_needs_its_package_where_batches_come_from_endpoints(
    script: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in compression.COMPRESSIONS if compression.is_installed(name)]

    def load(name: str | None) -> str:
        return digest(DataLoader(script.remote_test_noisy(), batch_size=4, shuffle=True, compression=name))

    expected = load(None)
    assert {load(name) for name in compression.COMPRESSIONS} == {expected}  # local, whether installed or not
    running = job(2)
    for name in names:
        stats = remote.fleet_for(running).stats
        before = stats.saved_bytes
        assert load(name) == expected
        assert stats.saved_bytes - before > 10 * 4 * 500 * 4 * 0.8
        summary = running.timers[-1].summary()
        assert summary.compression == name
        assert 10 * 4 * 500 * 4 * 0.8 < summary.saved_bytes < summary.batch_bytes
    monkeypatch.setattr(compression, "_module", lambda _: None)
    for name, package in (("lz4", "lz4"), ("zstd", "zstandard")):
        with pytest.raises(ConfigError, match=rf"needs the package {package}.*\n.*pip install lz4 zstandard"):
            DataLoader(script.remote_test_noisy(), compression=name)


def test_loader_unknown_compression_is_refused(script: Any) -> None:
    with pytest.raises(ConfigError, match="compression is 'gzip', expected None or one of lz4, zstd"):
        DataLoader(script.remote_test_noisy(), compression="gzip")
    loader = DataLoader(script.remote_test_noisy(), compression="lz4")
    assert loader.compression == "lz4"
