"""Trains with TensorFlow on samples that cost CPU time, by Keras or in a loop, for tests of profiles."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hetero
import hetero.tf


class Images:
    """Images of whole numbers as float32. Each takes some CPU time."""

    def __init__(self, num_samples: int, cpu_s: float) -> None:
        self.num_samples = num_samples
        self.cpu_s = cpu_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, float]:
        begin_s = time.process_time()
        while time.process_time() - begin_s < self.cpu_s:
            pass
        return np.full((8, 8, 3), index % 256, np.float32), float(index % 10)


@hetero.dataset(collate_fn=hetero.collate_arrays)
def tf_images(num_samples: int, cpu_s: float) -> Images:
    """Return the data set."""
    return Images(num_samples, cpu_s)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--way", choices=["fit", "loop", "unreported"], required=True)
    parser.add_argument("--num-samples", type=int, default=100_000)
    parser.add_argument("--cpu-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--steps-per-execution", type=int, default=1)
    args = parser.parse_args()
    sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))  # Keras would import them: half its time
    import tensorflow as tf

    hetero.on_stop(lambda: (args.output / "checkpoint").write_text("saved"))
    data = hetero.tf.from_dataset(tf_images(args.num_samples, args.cpu_s), batch_size=16, shuffle=True, seed=3)
    validation = hetero.tf.from_dataset(tf_images(32, 0.0), batch_size=16, name="validation")
    if args.way == "loop":
        scaled = data.map(lambda x, y: (x / 255.0, y)).prefetch(8)
        for step, (pixels, labels) in enumerate(data.measure(scaled), start=1):
            assert 0 <= float(tf.reduce_min(pixels)) <= float(tf.reduce_max(pixels)) <= 1
            assert float(tf.reduce_max(labels)) < 10
            time.sleep(args.step_s)
            if step % 40 == 0:
                assert sum(len(batch[0]) for batch in validation) == 32
    else:
        model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse", jit_compile=False, steps_per_execution=args.steps_per_execution)
        model.fit(
            data.repeat().prefetch(4),
            steps_per_epoch=100,
            epochs=20,
            validation_data=validation,
            shuffle=False,
            verbose=0,
            callbacks=[data.callback()] if args.way == "fit" else [],
        )
    (args.output / "finished").write_text("")


if __name__ == "__main__":
    main()
