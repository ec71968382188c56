"""What feeds the worker of Ray Train: hetero's data service, or Ray Data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray.train
from peers import PipelineCompetitor

from hetero.datasets import get_factory
from hetero.torch import DataLoader
from ray_jobs import LENGTHS_BATCHES
from ray_jobs.cpu_time import CpuTimes
from ray_jobs.processed import Unpack

__all__ = ["FEEDS", "DataServiceFeed", "RayDataFeed"]


class _Feed(PipelineCompetitor):
    """Measures the job around the worker.

    Args:
        config: The trial's, with ``cluster``, ``driver`` (its process id) and ``job_begin_s``, which the driver adds.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.length = LENGTHS_BATCHES[self.pipeline.name] * self.pipeline.batch_size
        self._job_first_batch_s = 0.0
        self._cpu_times: CpuTimes | None = None

    def consume(self, batch: Any) -> tuple[int, int]:
        counts = super().consume(batch)
        if not self._job_first_batch_s:
            # The driver's clock is the same: that of the machine.
            self._job_first_batch_s = time.monotonic() - self.config["job_begin_s"]
        return counts

    def begin_run(self) -> None:
        """Begin to count the CPU time of the job."""
        self._cpu_times = CpuTimes(self.config["cluster"], self.config["driver"])

    def facts(self) -> dict[str, Any]:
        """Return the time from the job's start to the first batch, and the CPU time of all its processes."""
        assert self._cpu_times is not None
        return {"job_first_batch_s": self._job_first_batch_s, **self._cpu_times.since()}


class DataServiceFeed(_Feed):
    """`hetero.ray.DataService` and `hetero.torch.DataLoader`, with its defaults, shuffled."""

    min_warmup_s = 2.0

    def start(self) -> None:
        """Connect, and make the loader."""
        self.config["service"].connect()
        spec = get_factory(self.pipeline.name)(length=self.length, root=self.root)
        self._loader: DataLoader[Any] = DataLoader(spec, batch_size=self.pipeline.batch_size, shuffle=True)

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        yield from self._loader


class RayDataFeed(_Feed):
    """``iter_torch_batches`` of the worker's shard. ``prefetch`` is its number of batches."""

    min_warmup_s = 7.0  # it starts processes, and works itself up to full speed meanwhile

    def start(self) -> None:
        """Get the shard."""
        self._shard = ray.train.get_dataset_shard("train")

    def epoch(self) -> Iterator[Any]:
        """Yield one pass over Ray's data set."""
        if self.pipeline.has_fixed_shapes:
            options: dict[str, Any] = {"batch_size": self.pipeline.batch_size}
        else:
            options = {"batch_size": 1, "collate_fn": Unpack()}  # a row is a batch
        yield from self._shard.iter_torch_batches(prefetch_batches=self.config["prefetch"], **options)


FEEDS = {"hetero": DataServiceFeed, "ray": RayDataFeed}
