"""`TokenBudget`: batches of samples of similar length, with about the same number of tokens on each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero.documents.arrays import array_of
from hetero.errors import ConfigError

__all__ = ["TokenBudget"]

_Lengths = npt.NDArray[np.int64]

# Samples of a step are neighbours in a pool that is sorted by length. A larger pool has less padding, and a smaller one
# keeps the order of the samples more. With the lengths of tests/plans/test_token_budgets.py and 32, 64 and 128 steps,
# padding was 4.9, 2.6 and 1.3 %, and ranks differed by 2.2, 1.6 and 0.8 % (bounds 5 and 2).
_POOL_STEPS = 128


class TokenBudget:
    """A batch sampler for `hetero.torch.DataLoader`: each batch takes at most ``max_tokens`` with its padding.

    All ranks plan the same steps. In each step all ranks have equally many samples, and lengths differ little, so no
    rank waits for another one. The order depends on the seed of the loader, the epoch and the number of ranks.

    Args:
        lengths: Tokens of each sample: an array, a list, or the path of a ``.npy`` file on each trainer host.
        max_tokens: Largest product of a batch's samples and the length of its longest sample.
        shuffle: Whether to permute the samples, and the steps of each pool of similar ones. If not, samples keep their
            order but for the sorting within pools.
        drop_last: Whether to leave out the last samples if they are too few for a step. If not, some of them are
            repeated, fewer than there are ranks.
        shard: Rank and number of ranks. None for those of the process group.

    Raises:
        ConfigError: If a length is not positive, or larger than ``max_tokens``.
    """

    def __init__(
        self,
        lengths: str | os.PathLike[str] | Sequence[int] | npt.NDArray[np.integer],
        max_tokens: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        self._lengths = _read_lengths(lengths)
        if len(self._lengths) and int(self._lengths.min()) < 1:
            raise ConfigError(f"sample {int(self._lengths.argmin())} has a length below 1; leave it out of the data")
        if len(self._lengths) and int(self._lengths.max()) > max_tokens:
            longest = int(self._lengths.argmax())
            raise ConfigError(
                f"sample {longest} has {self._lengths[longest]} tokens, and max_tokens is {max_tokens}\n"
                "  Cut long samples, or raise max_tokens."
            )
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._shard = shard

    def check_fits(self, num_samples: Callable[[], int]) -> None:
        """Check that there is a length for each sample of a data set. A data set without ``__len__`` passes.

        Args:
            num_samples: Returns the length of the data set, or raises TypeError.

        Raises:
            ConfigError: If not. With too few lengths, the last samples would be left out.
        """
        try:
            found = num_samples()
        except TypeError:
            return
        if len(self._lengths) != found:
            raise ConfigError(
                f"the TokenBudget has {len(self._lengths)} lengths, and the data set has {found} samples\n"
                "  Pass the length of each sample. If files have changed, run hetero index --lengths again."
            )

    def __len__(self) -> int:
        """Return the number of steps of the next pass. It plans that pass, and may differ a little between passes."""
        return sum(1 for _ in self._steps(*self._orders()))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's batches."""
        rank, num_ranks = self._rank()
        for samples in self._steps(*self._orders()):
            # Ranks take the samples, sorted by length, in turn: 0, 1, 2, 2, 1, 0, 0, 1 and so on. So none gets always
            # the longer ones.
            rounds = samples.reshape(-1, num_ranks)
            rounds[1::2] = rounds[1::2, ::-1].copy()
            yield rounds[:, rank].tolist()

    def _orders(self) -> tuple[npt.NDArray[np.int64], np.random.Generator]:
        """Return the order of the samples in a pass, and the generator for the order of the steps.

        A loader of hetero seeds the global generator for each pass, equally on all ranks.
        """
        generator = np.random.default_rng(np.random.randint(2**63))
        num_samples = len(self._lengths)
        return (generator.permutation(num_samples) if self.shuffle else np.arange(num_samples)), generator

    def _steps(self, order: npt.NDArray[np.int64], generator: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the samples of each step over all ranks, the longest first."""
        num_ranks = self._rank()[1]
        mean = max(1.0, float(self._lengths.mean())) if len(self._lengths) else 1.0
        pool_samples = max(num_ranks, int(_POOL_STEPS * num_ranks * self.max_tokens / mean))
        rest = order[:0]
        for begin in range(0, len(order), pool_samples):
            pool = np.concatenate([rest, order[begin : begin + pool_samples]])
            pool = pool[np.argsort(-self._lengths[pool], kind="stable")]
            steps = []
            while len(pool):
                size = self.max_tokens // int(self._lengths[pool[0]]) * num_ranks
                if size > len(pool):
                    break
                steps.append(pool[:size])
                pool = pool[size:]
            rest = pool
            for number in generator.permutation(len(steps)) if self.shuffle else range(len(steps)):
                yield steps[number]
        if len(rest) and not self.drop_last:
            # The last step has at most `max_tokens` for each rank too, because the rest was too small for a step.
            yield np.concatenate([rest, np.resize(rest, -len(rest) % num_ranks)])

    def _rank(self) -> tuple[int, int]:
        """Return rank and number of ranks."""
        if self._shard is not None:
            return self._shard
        import torch.distributed as dist

        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _read_lengths(lengths: str | os.PathLike[str] | Sequence[int] | npt.NDArray[np.integer]) -> _Lengths:
    """Return the lengths as an array.

    Raises:
        ConfigError: If they are not whole numbers, or cannot be read.
    """
    try:
        is_path = isinstance(lengths, (str, os.PathLike))
        found = array_of(Path(lengths).read_bytes()) if is_path else np.asarray(lengths)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the lengths of a TokenBudget cannot be read: {error}") from error
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        raise ConfigError(f"the lengths of a TokenBudget are {found.dtype} {found.shape}, expected whole numbers")
    return np.asarray(found, dtype=np.int64)
