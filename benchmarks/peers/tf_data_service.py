"""tf.data service: a dispatcher, two workers, the pipeline in TensorFlow's own operators (JPEG and tabular only)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import Competitor

from peers import LENGTH_BATCHES, NUM_PROCESSES, tf_service, touch

_SIDE = 224


class TfDataService(Competitor):
    """Workers of one thread each. Two of them equal two preprocessing processes. Batches travel uncompressed."""

    min_warmup_s = 1.0
    pauses = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        import tensorflow as _  # noqa: F401, ICN001 - a trainer has imported it before

        self._make, self._batch_size = PIPELINES[config["pipeline"]]

    def start(self) -> None:
        """Start dispatcher and workers."""
        self._service = tf_service.Service(NUM_PROCESSES, threads=1)

    def batches(self) -> Iterator[Any]:
        """Yield batches, as NumPy arrays over the received memory."""
        import tensorflow as tf

        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        options.autotune.enabled = False
        dataset = self._make(self.config["root"]).repeat().prefetch(2).with_options(options)
        service = tf.data.experimental.service.distribute(
            tf.data.experimental.service.ShardingPolicy.OFF, self._service.url, compression=None
        )
        yield from dataset.apply(service).prefetch(2).as_numpy_iterator()

    def consume(self, batch: Any) -> tuple[int, int]:
        """Touch it."""
        return self._batch_size, touch(batch)

    def stop(self) -> None:
        """End dispatcher and workers."""
        self._service.stop()


def make_jpeg(root: str, *, num_shuffled: int = 10_000, num_parallel_calls: int | None = None) -> Any:
    """Return the JPEG pipeline. Decoding is fused with the crop, which only TensorFlow offers.

    Args:
        root: Folder of the photographs.
        num_shuffled: Size of the shuffle buffer, in indices.
        num_parallel_calls: Number of samples computed at the same time. None: one.
    """
    import tensorflow as tf

    files = tf.constant(sorted(str(path) for path in Path(root).glob("train/*/*.jpg")))

    def sample(index: Any) -> Any:
        data = tf.io.read_file(files[index % tf.size(files, tf.int64)])
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.zeros([0, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        pixels = tf.image.decode_and_crop_jpeg(data, window, channels=3)
        pixels = tf.cast(tf.image.resize(pixels, [_SIDE, _SIDE]), tf.uint8)
        pixels = tf.image.random_flip_left_right(pixels)
        return tf.transpose(pixels, [2, 0, 1]), index % 8

    indices = tf.data.Dataset.range(64 * LENGTH_BATCHES).shuffle(num_shuffled)
    return indices.map(sample, num_parallel_calls=num_parallel_calls).batch(64, drop_remainder=True)


def make_tabular(_root: str) -> Any:
    """Return the tabular pipeline, row by row like the others."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    num_rows = 100_000
    numbers = generator.standard_normal((num_rows, 32), dtype=np.float32)
    categories = generator.integers(0, 1_000_000, (num_rows, 8))
    mean, scale = numbers.mean(axis=0), 1 / numbers.std(axis=0)
    held = tf.constant(numbers), tf.constant(categories)

    def sample(index: Any) -> Any:
        row = index % num_rows
        return (held[0][row] - mean) * scale, held[1][row] % 10_007, tf.cast(row % 2, tf.float64)

    return tf.data.Dataset.range(1024 * LENGTH_BATCHES).shuffle(10_000).map(sample).batch(1024, drop_remainder=True)


PIPELINES: Mapping[str, tuple[Callable[[str], Any], int]] = {"jpeg": (make_jpeg, 64), "tabular": (make_tabular, 1024)}
