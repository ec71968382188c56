"""Train a ResNet with TensorFlow: photographs are decoded and augmented by tf.data, on data hosts if there are any.

Make the data once, then train::

    python examples/photos/make_data.py
    python examples/resnet_tf/train.py

The same script is every rank of a homogeneous and of a heterogeneous job: README.md has the commands. A rank alone
trains by Keras' ``fit``. Several train in a loop, under `tf.distribute.MultiWorkerMirroredStrategy`, because Keras 3
(3.15 as well) cannot average its metrics over them: https://github.com/keras-team/keras/issues/20585.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import hetero

NUM_CLASSES = 8
"""Four zones of two photographs."""
_SHUFFLED = 4096
"""Size of the shuffle buffer, in names of photographs. A data host requests all of them before it begins."""


def list_photos(root: str, split: str) -> tuple[list[str], list[int]]:
    """Return the paths of the photographs, and the number of each one's folder, its class.

    Raises:
        FileNotFoundError: If the folder has no image.
    """
    folder = Path(os.path.expandvars(root), split)  # $SM_CHANNEL_... of the platform
    paths = sorted(folder.glob("*/*.jpg"))
    if not paths:
        raise FileNotFoundError(f"no images in {folder}: make them with examples/photos/make_data.py")
    classes = sorted({path.parent.name for path in paths})
    return [str(path) for path in paths], [classes.index(path.parent.name) for path in paths]


def augmented(path: Any, image_size: int, rounds: int) -> Any:
    """Return a photograph, cropped, flipped, blurred and in other colours, as uint8 of ``(image_size, image_size, 3)``.

    Args:
        path: Of the JPEG, a scalar of tf.string.
        image_size: Height and width in pixels.
        rounds: How often it is blurred, which makes it as heavy as one likes.
    """
    data = tf.io.read_file(path)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(data),
        tf.zeros([0, 0, 4]),
        area_range=(0.25, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], size[0], size[1]])  # only this is decoded
    pixels = tf.image.decode_and_crop_jpeg(data, window, channels=3)
    pixels = tf.image.resize(pixels, [image_size, image_size]) / 255.0
    pixels = tf.image.random_flip_left_right(pixels)
    for _ in range(rounds):
        pixels = blurred(pixels)
    pixels = tf.image.random_hue(pixels, 0.05)
    pixels = tf.image.random_saturation(pixels, 0.7, 1.4)
    pixels = tf.image.random_contrast(pixels, 0.7, 1.4)
    pixels = tf.image.random_brightness(pixels, 0.1)
    return tf.image.convert_image_dtype(pixels, tf.uint8, saturate=True)


def blurred(pixels: Any) -> Any:
    """Return an image of three channels under a small Gaussian filter, first along its columns, then along its rows."""
    weights = tf.constant([1.0, 4.0, 6.0, 4.0, 1.0]) / 16.0
    for shape in ([5, 1, 1, 1], [1, 5, 1, 1]):
        taps = tf.tile(tf.reshape(weights, shape), [1, 1, 3, 1])
        pixels = tf.nn.depthwise_conv2d(pixels[tf.newaxis], taps, strides=[1, 1, 1, 1], padding="SAME")[0]
    return pixels


def plain(path: Any, image_size: int) -> Any:
    """Return a photograph as it is, as uint8 of ``(image_size, image_size, 3)``."""
    pixels = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
    pixels = tf.image.resize(pixels, [image_size, image_size]) / 255.0
    return tf.image.convert_image_dtype(pixels, tf.uint8, saturate=True)


def training_batches(args: argparse.Namespace) -> Any:
    """Return endless batches, because every rank must take the same number wherever they come from.

    Data hosts share the photographs. Without data hosts, each rank draws from all of them in a different, unseeded
    order.
    """
    photos = list(zip(*list_photos(args.data, "train"), strict=True))
    random.Random(args.seed).shuffle(photos)  # a folder is a class, and what is drawn from may be less than all
    paths, labels = zip(*photos, strict=True)
    files = tf.data.Dataset.from_tensor_slices((list(paths), list(labels))).repeat().shuffle(_SHUFFLED)
    samples = files.map(
        lambda path, label: (augmented(path, args.image_size, args.rounds), label),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=False,
    )
    batches = samples.batch(args.batch_size, drop_remainder=True).prefetch(2)
    return hetero.tf.distribute(batches, placement="any", name="train")


def validation_batches(args: argparse.Namespace) -> Any:
    """Return all photographs of the validation in batches: from data hosts once over all ranks, else to every rank."""
    files = tf.data.Dataset.from_tensor_slices(list_photos(args.data, "validation"))
    samples = files.map(lambda path, label: (plain(path, args.image_size), label), num_parallel_calls=tf.data.AUTOTUNE)
    return hetero.tf.distribute(samples.batch(args.batch_size), placement="any", name="validation")


def make_model(args: argparse.Namespace) -> Any:
    """Return a network that takes uint8 images and gives logits."""
    images = tf.keras.Input((args.image_size, args.image_size, 3), dtype="uint8")
    # Bytes become floats here, on the device: a quarter of the data to send and to copy.
    features = tf.keras.layers.Rescaling(1 / 64, offset=-127.5 / 64)(images)
    if args.model == "resnet50":
        network = tf.keras.applications.ResNet50(
            weights=None,
            classes=NUM_CLASSES,
            input_shape=(args.image_size, args.image_size, 3),
            classifier_activation=None,
        )
        return tf.keras.Model(images, network(features))
    width = 16
    features = tf.keras.layers.Conv2D(width, 3, strides=2, padding="same", use_bias=False)(features)
    features = tf.keras.layers.ReLU()(tf.keras.layers.GroupNormalization(8)(features))
    for factor in (1, 2, 4, 8):
        features = residual_block(features, factor * width)
    features = tf.keras.layers.GlobalAveragePooling2D()(features)
    return tf.keras.Model(images, tf.keras.layers.Dense(NUM_CLASSES)(features))


def residual_block(features: Any, num_outputs: int) -> Any:
    """Return two 3 x 3 convolutions around a shortcut. Height and width are halved.

    Its norms keep no running statistics, because they would differ between ranks.
    """
    layers = tf.keras.layers
    body = layers.Conv2D(num_outputs, 3, strides=2, padding="same", use_bias=False)(features)
    body = layers.ReLU()(layers.GroupNormalization(8)(body))
    body = layers.Conv2D(num_outputs, 3, padding="same", use_bias=False)(body)
    body = layers.GroupNormalization(8)(body)
    shortcut = layers.Conv2D(num_outputs, 1, strides=2, use_bias=False)(features)
    return layers.ReLU()(layers.Add()([body, shortcut]))


class Progress(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Prints what `train_together` prints.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self._args = args
        self._epoch = 0
        self._num_steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print a line now and then. Keras gives the mean loss over the epoch."""
        self._num_steps += 1
        if self._num_steps % self._args.log_every == 0:
            print(f"epoch {self._epoch} step {self._num_steps} loss {float((logs or {})['loss']):.4f}", flush=True)


def train_alone(model: Any, optimizer: Any, batches: Any, steps_per_epoch: int, args: argparse.Namespace) -> None:
    """Train by Keras' ``fit``."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)  # compiling would take longer than a demonstration trains
    model.fit(
        batches,
        epochs=args.epochs,
        steps_per_epoch=steps_per_epoch,
        shuffle=False,
        verbose=0,
        callbacks=[batches.callback(), Progress(args)],
    )


def train_together(
    strategy: Any, model: Any, optimizer: Any, batches: Any, steps_per_epoch: int, args: argparse.Namespace, rank: int
) -> None:
    """Train with the other ranks, each on different batches. Gradients are summed over all ranks."""

    def replica_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.nn.compute_average_loss(losses)  # of the samples of all ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)

    num_steps = args.epochs * steps_per_epoch
    for number, (images, labels) in enumerate(itertools.islice(batches, num_steps), start=1):
        loss = step(images, labels)
        if rank == 0 and number % args.log_every == 0:
            print(f"epoch {(number - 1) // steps_per_epoch} step {number} loss {float(loss):.4f}", flush=True)


def evaluate(strategy: Any, model: Any, batches: Any) -> float:
    """Return the share of photographs that are classified correctly, over all ranks."""

    @tf.function(reduce_retracing=True)
    def count(images: Any, labels: Any) -> Any:
        found = tf.argmax(model(images, training=False), axis=1, output_type=labels.dtype)
        return tf.stack([tf.reduce_sum(tf.cast(found == labels, tf.float32)), tf.cast(tf.size(labels), tf.float32)])

    @tf.function
    def total(counts: Any) -> Any:
        return strategy.reduce("SUM", counts, axis=None)

    counts = tf.zeros([2])
    for images, labels in batches:  # ranks may have different numbers of batches, so they meet only after this loop
        counts += strategy.run(count, args=(images, labels))
    num_correct, num_photos = total(counts).numpy().tolist()
    return float(num_correct / num_photos)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and validate at the end."""
    args = parse_arguments(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[:1], "GPU")  # the launcher shows each rank only the GPU that it trains on
    # Call this before the rest of TensorFlow, because it starts the server that connects the ranks.
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if world_size > 1 else tf.distribute.get_strategy()
    batches, to_validate = training_batches(args), validation_batches(args)
    # Seeds the weights. If it came before the batches are defined, it would seed them too.
    tf.keras.utils.set_random_seed(args.seed)
    num_photos = len(list_photos(args.data, "train")[0])
    steps_per_epoch = args.steps_per_epoch or max(1, num_photos // (args.batch_size * world_size))
    with strategy.scope():
        model = make_model(args)
        optimizer = tf.keras.optimizers.AdamW(args.lr)
        optimizer.build(model.trainable_variables)
    if world_size == 1:
        train_alone(model, optimizer, batches, steps_per_epoch, args)
    else:
        train_together(strategy, model, optimizer, batches, steps_per_epoch, args, rank)
    accuracy = evaluate(strategy, model, to_validate)
    if rank == 0:
        print(f"step {args.epochs * steps_per_epoch} validation accuracy {accuracy:.3f}", flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a ResNet on photographs, with TensorFlow.", allow_abbrev=False)
    parser.add_argument("--data", default="data/photos", help="folder that make_data.py wrote (may name a $VARIABLE)")
    parser.add_argument("--model", choices=("small", "resnet50"), default="small", help="the network (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in all (%(default)s)")
    parser.add_argument("--steps-per-epoch", type=int, help="steps of an epoch (default: one pass over the data set)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (%(default)s)")
    parser.add_argument("--image-size", type=int, default=96, help="height and width in pixels (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often an image is blurred (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
