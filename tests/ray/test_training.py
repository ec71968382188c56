"""Ray Train's workers get the batches of hetero's data service, the same as without Ray."""

from __future__ import annotations

from collections.abc import Callable

from hetero.ray import DataService
from hetero.torch import DataLoader
from tests.support.ray.harness import Training, batches_in


def test_restarted_run_of_an_iterable_gets_the_remaining_batches(
    service: DataService, train: Callable[..., Training]
) -> None:
    import ray_chain

    # Ray restarts the workers from the checkpoint after 20 steps. A lane has 116 or 115 samples, so the ranks leave out
    # some after 28 steps of an epoch. The tests of the service resume a data set with an index.
    config = {"num_samples": 461, "epochs": 2, "step_s": 0.01, "save_every": 20, "fail_at": 30, "lanes": 4}
    training = train(service, config, max_failures=1)
    training.wait_ok()
    loader = DataLoader(
        ray_chain.iterated(461), batch_size=16, seed=17, guarantee="exactly-once", lanes=4, chunk_samples=8
    )
    batches = [batch for _ in range(2) for batch in loader]
    for rank in range(2):
        own = slice(8 * rank, 8 * rank + 8)
        whole = [ray_chain.line_of({name: values[own] for name, values in batch.items()}) for batch in batches]
        found = batches_in(training.folder, rank)
        remaining = len(whole) - 20
        assert found[-remaining:] == whole[20:]
        assert found[:-remaining] == whole[: len(found) - remaining]
