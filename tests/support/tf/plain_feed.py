"""A feed without TensorFlow: the test plays TensorFlow."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from hetero.loaders.pipeline import LoaderOptions
from hetero.spec import DatasetSpec
from hetero.tf.feed import Feed
from tests.support.tf import expected


class PlainReader:
    """Answers requests with their indices."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self.request: Any = None
        self.is_closed = False

    def __iter__(self) -> PlainReader:
        return self

    def __next__(self) -> list[int]:
        try:
            self.request = next(self._requests)
            return [int(index) for index in self.request.work.indices]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainFeed(Feed):
    """A feed whose batches are their indices."""

    def __init__(self, num_samples: int = 10, **changes: Any) -> None:
        options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 3, **changes}
        super().__init__(DatasetSpec("feed_test"), LoaderOptions(**options), num_workers=1, prefetch_factor=None)
        self._num_samples = num_samples
        self.readers: list[weakref.ref[PlainReader]] = []

    def num_samples(self) -> int:
        return self._num_samples

    def fingerprint(self) -> str:
        return "plain"

    def _open(self, requests: Iterator[Any], *, on_skips: Any, on_wait: Any) -> Any:
        reader = PlainReader(requests)
        self.readers.append(weakref.ref(reader))
        return reader

    def num_living_readers(self) -> int:
        """Return how many have neither been closed nor dropped."""
        readers = [reader() for reader in self.readers]
        return sum(reader is not None and not reader.is_closed for reader in readers)

    def place(self) -> tuple[int, int]:
        state = self.state()
        return state.epoch, state.batches


def epochs(first: int, last: int, num_samples: int = 10, **options: Any) -> list[list[int]]:
    """Return the batches of epochs, one after the other."""
    options = {"batch_size": 2, "seed": 3, "shuffle": True, **options}
    return [
        batch for epoch in range(first, last + 1) for batch in expected.indices(num_samples, epoch=epoch, **options)
    ]


def train(feed: Feed, iterator: Iterator[Any], count: int) -> list[Any]:
    """Run a training loop of ``count`` steps without prefetching."""
    found = []
    for _ in range(count):
        feed.begin_step()
        found.append(next(iterator))
        feed.consume(1)
    return found
