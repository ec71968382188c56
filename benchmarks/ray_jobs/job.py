"""The driver of a Ray Train job with one worker."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import ray.train.torch
from harness import Job, Run
from peers import endpoint_script
from pipelines import load

from hetero.ray import DataService
from ray_jobs import CLUSTER_VARIABLE, CPUS, EPOCHS, LENGTHS_BATCHES
from ray_jobs.cluster import DATA_LABELS, TRAINER_RESOURCE
from ray_jobs.processed import BatchActor, compute_batch, compute_row
from ray_jobs.training import train

__all__ = ["DataServiceJob", "RayDataJob"]


class _RayTrainJob(Job):
    """Runs a ``TorchTrainer``. Subclasses feed it.

    Its configuration is that of `peers`. The cluster is in the environment.
    """

    feed = ""
    """Key of `ray_jobs.feeds.FEEDS`."""

    def start(self) -> None:
        """Connect to the cluster."""
        self._cluster = json.loads(os.environ[CLUSTER_VARIABLE])
        ray.init(address=self._cluster["address"], logging_level=logging.WARNING, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        self._folder = tempfile.TemporaryDirectory(prefix="bench-ray-train-")

    def run(self, command: Mapping[str, Any]) -> Run:
        """Run the job."""
        result = Path(self._folder.name) / "run.json"
        begin_s = time.monotonic()
        with self.supply() as (config, datasets):
            ray.train.torch.TorchTrainer(
                train,
                train_loop_config={
                    **self.config,
                    **config,
                    "cluster": self._cluster,
                    "feed": self.feed,
                    "command": dict(command),
                    "driver": os.getpid(),
                    "job_begin_s": begin_s,
                    "result": str(result),
                },
                scaling_config=ray.train.ScalingConfig(
                    num_workers=1, resources_per_worker={"CPU": 1, TRAINER_RESOURCE: 1}
                ),
                run_config=ray.train.RunConfig(storage_path=self._folder.name),
                datasets=datasets,
            ).fit()
        return Run(**json.loads(result.read_text(encoding="utf-8")))

    def stop(self) -> None:
        """Disconnect. Ray then ends what the job has left."""
        ray.shutdown()
        self._folder.cleanup()

    @contextlib.contextmanager
    def supply(self) -> Iterator[tuple[dict[str, Any], dict[str, ray.data.Dataset]]]:
        """Yield additions to the worker's configuration, and the data sets of the trainer."""
        raise NotImplementedError
        yield {}, {}


class DataServiceJob(_RayTrainJob):
    """A data service with one data host that has all CPUs of the preprocessing."""

    feed = "hetero"

    @contextlib.contextmanager
    def supply(self) -> Iterator[tuple[dict[str, Any], dict[str, ray.data.Dataset]]]:
        """Make the service, and end it with the job."""
        with DataService(
            endpoint_script.__file__,
            script_args=[self.config["pipeline"]],
            num_hosts=1,
            cpus_per_host=CPUS,
            label_selector=DATA_LABELS,
        ) as service:
            yield {"service": service}, {}


class RayDataJob(_RayTrainJob):
    """A Ray data set.

    ``form`` says what computes it: ``actors`` and ``tasks`` compute batches, ``rows`` are tasks that compute one sample
    after the other. ``block_batches`` is the number of batches that a task computes, and of a block.
    """

    feed = "ray"

    @contextlib.contextmanager
    def supply(self) -> Iterator[tuple[dict[str, Any], dict[str, ray.data.Dataset]]]:
        """Describe the data set. Ray computes it when the worker iterates."""
        pipeline, form = load(self.config["pipeline"]), self.config["form"]
        num_batches = LENGTHS_BATCHES[pipeline.name]
        num_blocks = EPOCHS * num_batches // self.config["block_batches"]
        length = num_batches * pipeline.batch_size
        rows = ray.data.range(EPOCHS * length, override_num_blocks=num_blocks)
        arguments = (pipeline.name, self.config["root"], length)
        tasks = ray.data.TaskPoolStrategy(CPUS)
        if form == "actors":
            pool = ray.data.ActorPoolStrategy(size=CPUS)
            found = rows.map_batches(
                BatchActor, fn_constructor_args=arguments, batch_size=pipeline.batch_size, compute=pool, num_cpus=1
            )
        elif form == "tasks":
            found = rows.map_batches(
                compute_batch,
                fn_args=arguments,
                batch_size=pipeline.batch_size,
                compute=tasks,
                num_cpus=1,
            )
        else:
            found = rows.map(compute_row, fn_args=arguments, compute=tasks, num_cpus=1)
        yield {}, {"train": found}
