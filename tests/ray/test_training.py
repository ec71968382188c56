"""Ray Train's workers get the batches of hetero's data service, the same as without Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetero.ray import DataService
from tests.support.ray.harness import Training, alone, batches_in


def test_restarted_run_gets_the_remaining_batches(
    service: DataService, train: Callable[..., Training], tmp_path: Path
) -> None:
    # Ray restarts the workers from the checkpoint after 20 of 50 steps. 15 of these are in a second epoch.
    config = {"num_samples": 560, "epochs": 2, "step_s": 0.01, "save_every": 20, "fail_at": 30}
    training = train(service, config, max_failures=1)
    training.wait_ok()
    for rank, whole in enumerate(alone(tmp_path / "alone", config)):
        found = batches_in(training.folder, rank)
        assert found[-50:] == whole[20:]
        assert found[:-50] == whole[: len(found) - 50]
