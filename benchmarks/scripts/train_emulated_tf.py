"""The training script of price_performance.py --backend tf: the pipeline of `examples/resnet_tf` on emulated vCPUs.

A vCPU is an endless branch of an interleave. Every sample waits in its branch for the emulated time. (A branch for each
sample does not work, because TensorFlow begins 50 % more branches than requested.) Then the sample is augmented. This
work is real, and adds to the emulated time. No model is trained: ranks meet once a step, as they would to exchange
gradients.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep  # has no public name

import hetero.tf

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resnet_tf" / "train.py"
_IMAGE_SIZE = 32
_ROUNDS = 0
"""Blurs of a photograph. This is real work, so it must be little."""


def example() -> ModuleType:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("resnet_tf_train", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def emulated_batches(args: argparse.Namespace) -> Any:
    """Return batches without end, of a pipeline that has a sample under way for each of its vCPUs."""
    resnet = example()
    files = tf.data.Dataset.from_tensor_slices(resnet.list_photos(args.data, "train")).repeat()
    waited_out = files.apply(sleep(round(1e6 * args.sample_seconds)))
    vcpus = tf.data.Dataset.range(args.vcpus)
    samples = vcpus.interleave(
        lambda _: waited_out, cycle_length=args.vcpus, num_parallel_calls=args.vcpus, deterministic=False
    )
    samples = samples.map(lambda path, label: (resnet.augmented(path, _IMAGE_SIZE, _ROUNDS), label))
    options = tf.data.Options()
    options.autotune.enabled = False  # it would change the number of branches
    return samples.batch(args.batch_size, drop_remainder=True).prefetch(1).with_options(options)


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description="Take steps that only load.", allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    parser.add_argument("--steps", type=int, required=True, help="steps to take")
    parser.add_argument("--data", required=True, help="folder of photographs")
    parser.add_argument("--sample-seconds", type=float, required=True, help="what a sample costs one vCPU")
    parser.add_argument("--vcpus", type=int, required=True, help="vCPUs that a pipeline emulates")
    args = parser.parse_args()
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    strategy = tf.distribute.get_strategy() if is_alone else tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def meet(images: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(tf.size, args=(images,)), axis=None)

    # Sharding would divide the branches among the workers.
    batches = hetero.tf.distribute(emulated_batches(args), sharding="off", placement="any")
    for images, _ in itertools.islice(batches, args.steps):
        meet(images)


if __name__ == "__main__":
    main()
