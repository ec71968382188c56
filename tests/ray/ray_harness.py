"""Training runs on a Ray cluster, for the tests of `hetero.ray`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parent / "scripts" / "ray_chain.py"


class Training:
    """A training run on a thread, so that a test can disturb it."""

    def __init__(self, folder: Path, service: Any, config: dict[str, Any], **options: Any) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.error: BaseException | None = None
        self.result: Any = None
        self.ended_s = 0.0
        import ray_chain
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(ray_chain)  # as Ray does with the functions of a driver's own script
        self._trainer = TorchTrainer(
            ray_chain.train,
            train_loop_config={"service": service, "folder": str(folder), "num_samples": 800, **config},
            scaling_config=ScalingConfig(num_workers=options.get("num_workers", 2)),
            run_config=RunConfig(
                storage_path=str(folder / "ray"),
                failure_config=FailureConfig(max_failures=options.get("max_failures", 0)),
            ),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._trainer.fit()
        except BaseException as error:  # noqa: BLE001
            self.error = error
        self.ended_s = time.monotonic()

    def steps(self, *, rank: int = 0) -> int:
        """Return the number of steps that a rank has done."""
        path = self.folder / f"step-{rank}"
        return int(path.read_text()) if path.exists() else 0

    def wait_step(self, step: int, *, rank: int = 0, timeout_s: float = 120.0) -> None:
        """Wait until a rank has done this many steps."""
        deadline_s = time.monotonic() + timeout_s
        while self.steps(rank=rank) < step:
            assert self._thread.is_alive(), self.error
            assert time.monotonic() < deadline_s, f"rank {rank} has not reached step {step}"
            time.sleep(0.05)

    def wait(self, timeout_s: float = 120.0) -> None:
        """Wait for the end of the run."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the training hangs"

    def results(self) -> list[dict[str, Any]]:
        """Return what each rank was fed."""
        self.wait()
        assert self.error is None, self.error
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank-*.json"))]


def alone(config: dict[str, Any], *, world_size: int = 2) -> list[dict[str, Any]]:
    """Return what each rank is fed without Ray and without data hosts."""
    from ray_chain import chain

    config = {"num_samples": 800, **config, "sleep_s": 0.0, "step_s": 0.0}
    return [chain(config, rank=rank, world_size=world_size) for rank in range(world_size)]


def living(pids: list[int]) -> list[int]:
    """Return those of the processes that still run."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
