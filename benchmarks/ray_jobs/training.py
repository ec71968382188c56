"""The training function: it consumes batches as `bench_pipelines.py` does, and measures its process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import harness

__all__ = ["train"]


def train(config: dict[str, Any]) -> None:
    """Run as ``train_loop_per_worker``. Write what was measured to ``result``.

    Args:
        config: The trial's configuration, and what `ray_jobs.job` adds.
    """
    from ray_jobs.feeds import FEEDS  # the worker's imports, before any clock

    run = harness.run_once(FEEDS[config["feed"]](config), config["command"])
    facts = dict(run.facts)
    gigabytes = run.num_bytes / 1e9
    facts |= {
        "trainer_node_cpu_s_per_gb": facts["trainer_node_cpu_s"] / gigabytes,
        "machine_cpu_s_per_gb": facts["machine_cpu_s"] / gigabytes,
    }
    run = dataclasses.replace(run, supply_cpu_s=facts.pop("all_cpu_s") - run.trainer_cpu_s, facts=facts)
    Path(config["result"]).write_text(json.dumps(dataclasses.asdict(run)), encoding="utf-8")
