"""Converts batches to nested arrays for TensorFlow, and derives the specification that all batches must fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hetero.batches.imported import imported
from hetero.batches.structure.conversion import type_name
from hetero.errors import ConfigError

__all__ = [
    "check_element",
    "check_spec",
    "copied_element",
    "derive_spec",
    "element_nbytes",
    "num_samples_of",
    "to_element",
]

_NUMBERS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}
_TEXTS = (str, bytes)
_SHAPE_ADVICE = "  Pad in collate_fn, or pass element_spec= with None for every dimension that varies."
_DTYPE_ADVICE = "  Return one dtype in every batch, and pass the same dtype in element_spec= if you pass that."


def to_element(batch: Any) -> Any:
    """Return a batch as dictionaries, tuples and namedtuples of arrays. The arrays share memory with the batch.

    Python's numbers become arrays without dimensions (int64, float64, bool). Text becomes UTF-8 bytes in arrays of
    objects. A list of numbers of one type becomes an array of one dimension, and so does a list or tuple of text. Any
    other list becomes a tuple, because TensorFlow treats a list as a tensor.

    Raises:
        ConfigError: If the batch contains None or another value that cannot be a tensor. The message names the path.
    """
    return _element(batch, "batch")


def copied_element(batch: Any) -> Any:
    """Return a batch as `to_element` does, but with new arrays, because TensorFlow may write to the arrays."""
    return tf.nest.map_structure(np.copy, to_element(batch))


def element_nbytes(batch: Any) -> int:
    """Return the bytes of a batch's arrays. Text does not count."""
    return sum(leaf.nbytes for leaf in tf.nest.flatten(to_element(batch)))


def num_samples_of(element: Any) -> int:
    """Return the length of the first array that has dimensions. Return 1 if all arrays are scalars."""
    leaves = (leaf for leaf in tf.nest.flatten(element) if leaf.ndim)
    return next((len(leaf) for leaf in leaves), 1)


def derive_spec(probes: Sequence[tuple[int, Any]], *, batch_size: int | None, drop_last: bool) -> Any:
    """Return the nested `tf.TensorSpec` that all batches fit.

    If a dimension is equal in both probes, it is kept. If a dimension differs, it usually becomes None. But if all
    batches are whole and the dimension grows with the number of samples, it gets the value for a whole batch. Without
    a batch size the first dimension of every tensor is None, as in Keras.

    Args:
        probes: Two pairs of a number of samples and an element. With a batch size, the numbers differ.
        batch_size: Samples of a whole batch. None if the data set makes batches of any size.
        drop_last: Whether all batches are whole.

    Raises:
        ConfigError: If the elements differ in structure, rank or dtype. The message names the path.
    """
    (num_first, first), (num_second, second) = probes

    def dimension(one: int, other: int) -> int | None:
        """Return the dimension that all batches have, from its lengths in the two probes. None if it varies."""
        if one == other:
            return one
        # Whether the dimension is proportional to the number of samples in the probe. Without ``drop_last``, the last
        # batch may have fewer samples, so such a dimension varies.
        grows = one * num_second == other * num_first
        return one * batch_size // num_first if batch_size is not None and drop_last and grows else None

    def leaf(path: str, one: Any, other: Any) -> Any:
        """Return the specification that one array of both probes fits. ``path`` is the array's place in the batch."""
        if one.dtype != other.dtype:
            raise ConfigError(
                f"{path} has dtype {one.dtype} in one batch and {other.dtype} in another\n{_DTYPE_ADVICE}"
            )
        if one.ndim != other.ndim:
            of_first, of_second = (
                ("one batch", "another")
                if batch_size is None
                else (f"a batch of {num_first} samples", f"one of {num_second}")
            )
            raise ConfigError(
                f"{path} has shape {one.shape} in {of_first} and {other.shape} in {of_second}\n"
                "  Return the same number of dimensions in every batch."
            )
        shape = [dimension(*pair) for pair in zip(one.shape, other.shape, strict=True)]
        # The data set makes batches of any size, even if both probes have the same size.
        if batch_size is None and shape:
            shape[0] = None
        return tf.TensorSpec(shape, tf.as_dtype(one.dtype))

    return _merge(first, second, path="batch", leaf=leaf)


def check_spec(spec: Any) -> Any:
    """Return a user's specification unchanged.

    Raises:
        ConfigError: If a part is not a dict, tuple, namedtuple or `tf.TensorSpec`. The message names the part.
    """

    def leaf(path: str, one: Any, _: Any) -> Any:
        """Return a part of the specification, if it is valid. ``path`` is the part's place in the batch."""
        if not isinstance(one, tf.TensorSpec):
            found = type_name(type(one))
            raise ConfigError(f"element_spec: {path} is a {found}, expected tf.TensorSpec, or dicts or tuples of it")
        return one

    # Merging a specification with itself visits each part.
    return _merge(spec, spec, path="batch", leaf=leaf)


def check_element(element: Any, spec: Any) -> None:
    """Check that an element fits the specification.

    Raises:
        ConfigError: If it does not fit. The message names the path, the found value and the expected value.
    """
    _merge(element, spec, "batch", _check_leaf)


def _check_leaf(path: str, array: Any, spec: Any) -> None:
    """Check that an array fits its specification. ``path`` is the array's place in the batch, for errors."""
    if spec.dtype != tf.as_dtype(array.dtype):
        raise ConfigError(
            f"{path} has dtype {array.dtype}, expected {spec.dtype.name} as in the element_spec\n{_DTYPE_ADVICE}"
        )
    if not spec.shape.is_compatible_with(array.shape):
        raise ConfigError(
            f"{path} has shape {array.shape}, expected {spec.shape} as in the element_spec\n{_SHAPE_ADVICE}"
        )


def _element(value: Any, path: str) -> Any:
    """Return a part of a batch as `to_element` does. ``path`` is where the part is in the batch, for errors."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    torch = imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_array(torch, value)
    kind = type(value)
    if kind in _NUMBERS:
        return np.asarray(value, _NUMBERS[kind])
    if kind in _TEXTS:
        return _text_array([value]).reshape(())
    if isinstance(value, dict):
        if len({type(key) for key in value}) > 1:  # because TensorFlow sorts the keys
            raise ConfigError(f"{path} has keys of several types, which TensorFlow cannot sort\n  Make all keys str.")
        return {key: _element(item, f"{path}[{key!r}]") for key, item in value.items()}
    if kind in (list, tuple):
        kinds = {type(item) for item in value}
        only = kinds.pop() if len(kinds) == 1 else None
        if only in _TEXTS:  # torch collates texts to a tuple if samples are tuples
            return _text_array(value)
        if kind is list and only in _NUMBERS:
            return np.array(value, _NUMBERS[only])
        return tuple(_element(item, f"{path}[{place}]") for place, item in enumerate(value))
    if isinstance(value, tuple) and (names := getattr(kind, "_fields", None)) is not None:
        # A namedtuple's own constructor takes its items as separate arguments.
        steps = [f".{name}" for name in names]
        return tuple.__new__(kind, [_element(item, path + step) for item, step in zip(value, steps, strict=True)])
    if value is None:
        raise ConfigError(f"{path} is None, which cannot be a tensor\n  Leave it out in collate_fn.")
    raise ConfigError(
        f"{path} is a {type_name(kind)}, which cannot be a tensor\n"
        "  Return dicts, tuples or namedtuples of arrays from collate_fn."
    )


def _tensor_array(torch: Any, tensor: Any) -> Any:
    if tensor.dtype is torch.bfloat16:  # NumPy does not have this dtype, but TensorFlow adds it
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


def _text_array(texts: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return an array of objects with the texts as UTF-8 bytes."""
    # An array of NumPy's own bytes type would lose NUL bytes at the end of a text.
    array = np.empty(len(texts), object)
    array[:] = [text.encode() if isinstance(text, str) else text for text in texts]
    return array


def _merge(one: Any, other: Any, path: str, leaf: Callable[[str, Any, Any], Any]) -> Any:
    """Return the common structure of two values, with the result of ``leaf`` for each pair of leaves.

    Raises:
        ConfigError: If the structures differ.
    """
    if isinstance(one, dict):
        if not isinstance(other, dict) or set(one) != set(other):
            raise _other_structure(path, one, other)
        return {key: _merge(one[key], other[key], f"{path}[{key!r}]", leaf) for key in one}
    if isinstance(one, tuple):
        if type(one) is not type(other) or len(one) != len(other):
            raise _other_structure(path, one, other)
        pairs = enumerate(zip(one, other, strict=True))
        # A namedtuple's own constructor takes its items as separate arguments.
        return tuple.__new__(type(one), [_merge(*pair, f"{path}[{place}]", leaf) for place, pair in pairs])
    if isinstance(other, dict | tuple):
        raise _other_structure(path, one, other)
    return leaf(path, one, other)


def _other_structure(path: str, one: Any, other: Any) -> ConfigError:
    """Return the error for two batches whose structures differ at ``path``."""
    return ConfigError(
        f"{path} is {_outline(one)} in one batch, expected {_outline(other)}\n"
        "  All batches must have the same structure. If the length of a list varies, pad and stack it in collate_fn."
    )


def _outline(value: Any) -> str:
    """Return a short description of a value's structure, for errors."""
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, value))}"[:200]
    if isinstance(value, tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "a tensor"
