"""Training runs on a Ray cluster, for the tests of `hetero.ray`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parents[2] / "ray" / "scripts" / "ray_chain.py"
DATA = {"role": "data"}
"""Labels of the nodes for data hosts."""
PATIENCE_S = 900.0
"""How long a test waits. On a busy machine Ray has taken two minutes to start the workers of a training run."""


def processes_of(admission: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the process ids of a service's actors and their children, by ``coordinator`` or the number of a data host.

    Args:
        admission: The answer of the coordinator's method ``admission``.
    """
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            key = ""
            if "hetero.ray.coordinator" in words and admission["job_id"] in words:
                key = "coordinator"
            elif f"--join={admission['launcher']}" in words:
                name = next(word for word in words if word.startswith("--host="))
                key = name.removeprefix("--host=data-").partition("-")[0]
            if key and psutil.Process(process.ppid()).cmdline() != words:  # not a fork of such a process
                found[key] = [process.ppid(), process.pid]
    return found


class Training:
    """A training run on a thread. A test can disturb it."""

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
            train_loop_config={"service": service, "folder": str(folder), **config},
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

    def steps(self) -> int:
        """Return the number of batches that rank 0 has got."""
        return len(batches_in(self.folder, 0))

    def wait_step(self, step: int) -> None:
        """Wait until rank 0 has done this many steps."""
        wait_until(lambda: self.steps() >= step or self.ended_s, f"step {step}")
        assert not self.ended_s, self.error

    def wait(self) -> None:
        """Wait for the end of the run."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the training hangs"

    def wait_ok(self) -> None:
        """Wait until the run has ended well."""
        self.wait()
        assert self.error is None, self.error

    def wait_failed(self, cause: str) -> None:
        """Check that the run fails within 30 s, with this cause."""
        begin_s = time.monotonic()
        self.wait()
        print(f"the training failed after {self.ended_s - begin_s:.1f} s: {str(self.error)[:300]}")
        assert cause in str(self.error)
        assert self.ended_s - begin_s < 30


def batches_in(folder: Path, rank: int) -> list[str]:
    """Return the batches that a rank has got."""
    path = folder / f"batches-{rank}"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def alone(folder: Path, config: dict[str, Any], *, world_size: int = 2, report: Any = None) -> list[list[str]]:
    """Return the batches of each rank without Ray and without data hosts.

    Args:
        folder: Folder for the files of the run.
        config: Settings of the run with Ray.
        world_size: Number of ranks.
        report: Called after each step, see `ray_chain.chain`.
    """
    from ray_chain import chain

    folder.mkdir()
    config = {**config, "sleep_s": 0.0, "step_s": 0.0, "folder": str(folder)}
    for rank in range(world_size):
        chain(config, rank=rank, world_size=world_size, report=report)
    return [batches_in(folder, rank) for rank in range(world_size)]


def check_batches(folder: Path, config: dict[str, Any], *, world_size: int = 2, first: int = 0) -> None:
    """Check that ranks that were stopped at any step got the same batches as without Ray: none lost, none repeated.

    Args:
        folder: Folder of the run.
        config: Settings of the run.
        world_size: Number of ranks.
        first: Number of batches that each rank had got before.
    """
    found = [batches_in(folder, rank) for rank in range(world_size)]
    expected = alone(folder / "alone", {**config, "stop_at": first + max(map(len, found))}, world_size=world_size)
    for own, whole in zip(found, expected, strict=True):
        assert own
        assert own == whole[first : first + len(own)]


def wait_until(condition: Callable[[], object], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def check_ended(processes: dict[str, list[int]]) -> None:
    """Check that all processes of a service end after a while."""
    pids = [pid for each in processes.values() for pid in each]
    wait_until(lambda: not any(map(_lives, pids)), "processes are left", timeout_s=300.0)


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
