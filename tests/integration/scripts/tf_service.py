"""Trains on nothing with batches of tf.data.service, and writes the elements of each pass of each rank."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hetero
import hetero.tf

NUM_FILES = 8
BATCH_SIZE = 4
STEP_S = 0.01
PAUSE_AT = 20
"""Batches of a rank until it pauses, if it does."""
WAIT_S = 200.0


class Run:
    """What one rank does and writes."""

    def __init__(self, output: Path, num_elements: int) -> None:
        self.output = output
        self.num_elements = num_elements
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.generation = os.environ["HETERO_RESTART_COUNT"]
        self.passes: dict[str, list[list[int]]] = {}
        self.held: list[Any] = []
        """Iterators that are open when the process ends."""

    def numbers(self) -> Any:
        """Return a dataset of numbers, in batches."""
        import tensorflow as tf

        return tf.data.Dataset.range(self.num_elements).batch(BATCH_SIZE)

    def numbers_in_files(self) -> Any:
        """Return the same numbers from files."""
        import tensorflow as tf

        paths = [self.output / f"numbers-{index}.txt" for index in range(NUM_FILES)]
        if self.rank == 0:
            for index, path in enumerate(paths):
                path.write_text("".join(f"{number}\n" for number in range(index, self.num_elements, NUM_FILES)))
        self.meet("files")
        lines = tf.data.Dataset.from_tensor_slices([str(path) for path in paths]).interleave(tf.data.TextLineDataset)
        return lines.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(BATCH_SIZE)

    def take(self, name: str, batches: Iterable[Any], *, pause: bool = False, leave_at: int = 0) -> None:
        """Take a pass under a name once all ranks are here, and write down what came.

        Args:
            name: Name of the pass. Passes may share one.
            batches: What is iterated over.
            pause: Whether to pause in its middle until the test continues it.
            leave_at: Last step of the loop. 0: at its end.
        """
        self.meet(f"{name}-{len(self.passes.setdefault(name, []))}")
        found: list[int] = []
        for num_steps, batch in enumerate(batches, start=1):
            found += batch.numpy().tolist()
            time.sleep(STEP_S)
            if pause and num_steps == PAUSE_AT:
                self.stand_still(name)
            if num_steps == leave_at:
                break
        self.passes[name].append(found)
        print(f"{name}: rank {self.rank} has had {len(found)} elements", flush=True)
        (self.output / f"rank-{self.rank}.json").write_text(json.dumps(self.passes))

    def stand_still(self, name: str) -> None:
        """Wait until the test says to go on."""
        print(f"{name}: rank {self.rank} stands still", flush=True)
        wait_for((self.output / f"go-{name}").exists)

    def meet(self, name: str) -> None:
        """Wait until all ranks are here."""
        folder = self.output / f"{name}-{self.generation}"
        folder.mkdir(exist_ok=True)
        (folder / str(self.rank)).touch()
        wait_for(lambda: len(list(folder.iterdir())) == self.world_size)


def wait_for(predicate: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not predicate():
        if time.monotonic() > deadline_s:
            raise TimeoutError("nobody came")
        time.sleep(0.02)


def calm(run: Run) -> None:
    """Take passes under several policies and placements, leave one early, and leave iterators without end open."""
    dynamic = hetero.tf.distribute(run.numbers(), name="dynamic")
    for _ in range(2):
        run.take("dynamic", dynamic)
    run.take("left", dynamic, leave_at=5)
    run.take("after", dynamic)
    run.take("data", hetero.tf.distribute(run.numbers(), sharding="data", name="data"))
    run.take("file", hetero.tf.distribute(run.numbers_in_files(), sharding="file", name="file"))
    for placement in ("remote", "any"):
        copies = hetero.tf.distribute(run.numbers(), sharding="off", placement=placement, name=placement)
        run.take(placement, copies)
    endless = hetero.tf.distribute(run.numbers().repeat(), name="endless")
    run.held = [iter(endless), iter(endless.prefetch(8))]
    for iterator in run.held:
        run.take("endless", iterator, leave_at=30)


def faults(run: Run) -> None:
    """Pause in the middle of passes under several policies, then train without end until asked to stop."""
    numbers = {"dynamic": run.numbers(), "file": run.numbers_in_files(), "off": run.numbers()}
    policies = {
        name: iter(hetero.tf.distribute(dataset, sharding=name, name=name)) for name, dataset in numbers.items()
    }
    for name, batches in policies.items():
        run.take(name, batches, leave_at=PAUSE_AT)
    run.stand_still("policies")
    for name, batches in policies.items():
        run.take(name, batches)
    run.take("journal", hetero.tf.distribute(run.numbers(), name="journal"), pause=True)
    run.take("endless", hetero.tf.distribute(run.numbers().repeat(), name="endless"), pause=True, leave_at=200)
    until_stopped(run)


def forgotten(run: Run) -> None:
    """Take a pass, and pause in the middle of another one."""
    data = hetero.tf.distribute(run.numbers())
    run.take(f"whole-{run.generation}", data)
    run.take(f"halted-{run.generation}", data, pause=True)


def late(run: Run) -> None:
    """Take a pass that needs all workers, then read in rounds. A rank fails in one of them.

    The other ranks wait for a batch when it does.
    """
    run.take("data", hetero.tf.distribute(run.numbers(), sharding="data"))
    for num_steps, _ in enumerate(hetero.tf.distribute(run.numbers().repeat(), coordinated=True), start=1):
        if num_steps == PAUSE_AT and run.rank == 1:
            print("rank 1 raises", flush=True)
            raise RuntimeError("training fails on purpose")


def endless(run: Run) -> None:
    """Train until asked to stop."""
    until_stopped(run)


def until_stopped(run: Run) -> None:
    """Train until asked to stop, and say after how many steps that was."""
    num_steps = 0
    hetero.on_stop(lambda: (run.output / f"stopped-{run.rank}").write_text(str(num_steps)))
    for _ in hetero.tf.distribute(run.numbers().repeat(), name="until stopped"):
        num_steps += 1
        time.sleep(STEP_S)
        if num_steps == PAUSE_AT:
            print(f"rank {run.rank} is in the midst of it", flush=True)


SCENARIOS = {scenario.__name__: scenario for scenario in (calm, faults, forgotten, late, endless)}


def main() -> None:
    """Run a scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-elements", type=int, required=True)
    args = parser.parse_args()
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # no Keras here: TensorFlow's import takes half as long without
    run = Run(args.output, args.num_elements)
    SCENARIOS[args.scenario](run)
    print(f"rank {run.rank} has reached its last line", flush=True)


if __name__ == "__main__":
    main()
