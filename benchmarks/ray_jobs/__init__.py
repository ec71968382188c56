"""Ray Train jobs for `bench_ray.py`: one worker, fed by hetero's data service or by Ray Data.

cluster.py    the Ray cluster, a server of the harness: a node for the trainer and a node for preprocessing
job.py        the driver: a `harness.Job` that makes the data service or the data set, and runs a ``TorchTrainer``
training.py   the worker of Ray Train: measures itself with `harness.run_once`
feeds.py      what the worker is fed by: `DataServiceFeed` and `RayDataFeed`
processed.py  what Ray Data's tasks and actors run
cpu_time.py   CPU time of both nodes and of the machine
"""

from __future__ import annotations

__all__ = ["CLUSTER_VARIABLE", "CPUS", "EPOCHS", "LENGTHS_BATCHES"]

CLUSTER_VARIABLE = "BENCH_RAY_CLUSTER"
"""Environment variable that holds what `ray_jobs.cluster.serve` has yielded, as JSON."""

CPUS = 2
"""Logical CPUs for preprocessing: hetero's endpoints, or the concurrent tasks or actors of Ray Data."""

EPOCHS = 2
"""Epochs in one Ray data set. No run should see its end, because Ray begins anew after it."""

LENGTHS_BATCHES = {
    "jpeg": 2_000,
    "detection": 3_000,
    "audio": 2_000,
    "text": 5_000,
    "video": 600,
    "tabular_batches": 10_000,
}
"""Batches of an epoch, by pipeline: more than a run consumes, and few enough for a short list of Ray's read tasks."""
