"""The training script of price_performance.py --backend tf: the pipeline of `examples/resnet_tf` on emulated vCPUs.

A vCPU is a branch of an interleave, in which every sample waits for as long as it would take. What is done to it then
is real, and comes on top. There is no model: ranks meet once a step, as gradients would make them.
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

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "resnet_tf" / "train.py"
_IMAGE_SIZE = 32
_ROUNDS = 0
"""Blurs of a photograph: real work, of which there is to be little."""


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
    wait = sleep(round(1e6 * args.sample_seconds))

    def waited_out(path: Any, label: Any) -> Any:
        return tf.data.Dataset.from_tensors((path, label)).apply(wait)

    files = tf.data.Dataset.from_tensor_slices(resnet.list_photos(args.data, "train")).repeat()
    samples = files.interleave(
        waited_out, cycle_length=args.vcpus, num_parallel_calls=args.vcpus, deterministic=False
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
    parser.add_argument("--vcpus", type=int, required=True, help="vCPUs that a pipeline stands for")
    args = parser.parse_args()
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    strategy = tf.distribute.get_strategy() if is_alone else tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def meet(images: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(tf.size, args=(images,)), axis=None)

    batches = hetero.tf.distribute(emulated_batches(args), placement="any")
    for images, _ in itertools.islice(batches, args.steps):
        meet(images)


if __name__ == "__main__":
    main()
