"""Random keys of samples and batches, and seeding of the process's generators with these keys.

A key is a 64-bit integer. It is the blake2b hash of bytes that are different for
different arguments. The tests compare keys with recorded values, because other keys
would silently change the augmentation in every user's next run.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from operator import index as to_integer
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.indices import fits_int64, index_bytes, is_integers
from hetero.errors import ConfigError
from hetero.spec import Index

__all__ = [
    "BUILD_KEY",
    "batch_key",
    "generator_states",
    "preserved_generators",
    "sample_key",
    "seed_generators",
    "single_threaded",
    "torch_generator_is_untouched",
]

# Every hashed message starts with a tag and a head of fixed size. One field of varying length may follow.
_INTEGER = struct.Struct("<cqQIq").pack
_HEAD = struct.Struct("<cqQI").pack
_BATCH_HEAD = struct.Struct("<cqQQ").pack
_SAMPLE, _BATCH, _BUILD = b"hetero.sample", b"hetero.batch", b"hetero.build"

BUILD_KEY = int.from_bytes(blake2b(b"", digest_size=8, person=_BUILD).digest(), "little")
"""Key that seeds the generators before a data set's factory runs.

It is the same for all factories, arguments and hosts. ``random_split`` in a factory ``photos`` therefore makes the same
split for ``photos(split="train")`` and for ``photos(split="val")``.
"""

_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # `random` exports the methods of this generator
_seed_python = super(random.Random, _python).seed


def sample_key(seed: int, epoch: int, index: Index, occurrence: int) -> int:
    """Return the 64-bit key of one sample. Costs about 1 us.

    Args:
        seed: The loader's seed, a signed 64-bit integer.
        epoch: Unsigned 64-bit.
        index: Index that the sampler yielded.
        occurrence: How often ``index`` came before in the epoch's global order, unsigned 32-bit.

    Raises:
        ConfigError: If a number is out of its range, or the index has a type that `index_bytes` rejects.
    """
    try:
        # The first byte names the form of the index. So indices of different types have different messages. The most
        # common forms have separate, short messages, which saves time.
        if isinstance(index, str):
            message = _HEAD(b"s", seed, epoch, occurrence) + index.encode("utf-8", "surrogatepass")
        elif isinstance(index, tuple) and is_integers(index):
            message = _HEAD(b"t", seed, epoch, occurrence) + struct.pack(f"<{len(index)}q", *index)
        elif (integer := _int64(index)) is not None:
            message = _INTEGER(b"i", seed, epoch, occurrence, integer)
        else:
            message = _HEAD(b"x", seed, epoch, occurrence) + index_bytes(index)
    except (struct.error, TypeError) as exc:
        raise ConfigError(f"no key for {seed=}, {epoch=}, {index=}, {occurrence=}: {exc}") from exc
    return int.from_bytes(blake2b(message, digest_size=8, person=_SAMPLE).digest(), "little")


def batch_key(seed: int, epoch: int, position: int, indices: npt.NDArray[np.int64] | Sequence[Index]) -> int:
    """Return the 64-bit key of one batch, for collation and for ``seeding="batch"``.

    Args:
        seed: The loader's seed, a signed 64-bit integer.
        epoch: Unsigned 64-bit.
        position: Position of the batch in the epoch, unsigned 64-bit.
        indices: Indices of the batch. An array and a tuple of the same integers give the same key.

    Raises:
        ConfigError: If a number is out of its range, or an index has a type that `index_bytes` rejects.
    """
    try:
        message = _BATCH_HEAD(b"b", seed, epoch, position)
        # Convert other sequences of integers to an array, because both must give the same key. The second tag separates
        # arrays from other indices.
        if not isinstance(indices, np.ndarray):
            integers = [_int64(index) for index in indices]
            if None not in integers:
                indices = np.array(integers, dtype="<i8")
        if isinstance(indices, np.ndarray):
            message += b"a" + indices.astype("<i8", copy=False).tobytes()
        else:
            message += b"m" + b"".join(index_bytes(index) for index in indices)
    except (struct.error, TypeError) as exc:
        raise ConfigError(f"no key for {seed=}, {epoch=}, {position=}: {exc}") from exc
    return int.from_bytes(blake2b(message, digest_size=8, person=_BATCH).digest(), "little")


def seed_generators(key: int) -> None:
    """Seed `random`, NumPy's global generator and, if torch is imported, its default generator.

    The generators belong to the whole process. Call this only in the thread that computes. Costs about 6 us.

    Args:
        key: Unsigned 64-bit.
    """
    # Do what random.seed does with an integer, but without its Python code. That code takes 0.3 us in a loop, and up to
    # 4 us if the CPU caches have lost it because an image was decoded.
    _seed_python(key)
    _python.gauss_next = None
    # NumPy and torch both expand 32 bits into the same Mersenne twister state. Give each a different half of the key,
    # because with the same half both would draw the same numbers.
    np.random.seed(key >> 32)
    generator = _torch_generator()
    if generator is not None:
        # Clear the highest bit. torch.initial_seed() is then an int64, as in torch's workers. The draws do not change,
        # because the Mersenne twister uses only the lower half of the key.
        generator.manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators of `random`, NumPy and torch. Equal states draw equal numbers."""
    numpy_state: Any = np.random.get_state()
    generator = _torch_generator()
    torch_state = b"" if generator is None else generator.get_state().numpy().tobytes()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2:], torch_state


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of `random`, NumPy and torch on exit. Use it for a fetch in the trainer.

    If torch is first imported inside this context, its generator has no earlier state. It is then seeded at random on
    exit, as in any process that imports torch.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    generator = _torch_generator()
    torch_state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if (generator := _torch_generator()) is not None:
            generator.seed() if torch_state is None else generator.set_state(torch_state)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Make torch compute with one thread, as in workers and endpoints. Costs 0.2 us.

    The bits of a sum may depend on the number of threads.
    """
    torch: Any = sys.modules.get("torch")
    num_threads = 1 if torch is None else torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def torch_generator_is_untouched() -> bool:
    """Return whether torch's default generator drew nothing since it was seeded. True if torch is not imported."""
    generator = _torch_generator()
    if generator is None:
        return True
    seeded = sys.modules["torch"].Generator().manual_seed(generator.initial_seed())
    return bool((generator.get_state() == seeded.get_state()).all())


def _torch_generator() -> Any:
    """Return torch's default generator, or None if torch is not imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        return torch.default_generator
    except AttributeError:
        # Another thread is importing torch. import_module waits until the import is complete.
        return import_module("torch").default_generator


def _int64(index: object) -> int | None:
    """Return an index as an integer, or None if it is not an integer of 64 bits."""
    try:
        integer = to_integer(index)  # type: ignore[arg-type]
    except TypeError:
        return None
    return integer if fits_int64(integer) else None
