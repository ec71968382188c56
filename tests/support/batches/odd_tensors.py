"""Tensors that samples may hold and that hardly any code expects."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.parameter import UninitializedParameter

__all__ = ["ODD", "make"]


class Locked(torch.Tensor):
    """A class of the user that cannot be inspected."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PermissionError("not allowed")


class Unreadable:
    """An object whose every use fails."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise PermissionError("not allowed")

    def __getattr__(self, name: str) -> Any:
        raise PermissionError("not allowed")


ODD: dict[str, Callable[[float], Any]] = {
    "nested": lambda x: torch.nested.nested_tensor([torch.full((2, 3), x), torch.ones(1, 3)]),
    "jagged": lambda x: torch.nested.nested_tensor([torch.full((2, 3), x), torch.ones(1, 3)], layout=torch.jagged),
    "coo": lambda x: (torch.eye(3) * x).to_sparse(),
    "coo beyond memory": lambda x: torch.sparse_coo_tensor([[0, 0]], [x, 2.0], (10**12,), check_invariants=False),
    "csr": lambda x: (torch.eye(3) * x).to_sparse_csr(),
    "csc": lambda x: (torch.eye(3) * x).to_sparse_csc(),
    "bsr": lambda x: (torch.eye(4) * x).to_sparse_bsr((2, 2)),
    "bsc": lambda x: (torch.eye(4) * x).to_sparse_bsc((2, 2)),
    "mkldnn": lambda x: torch.full((2, 3), x).to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(torch.ones(4), 0.1 * x, 0, torch.qint8),
    "quantized per channel": lambda x: torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.1, 0.2]) * x, torch.tensor([0, 1]), 0, torch.qint8
    ),
    "float8": lambda x: torch.full((3,), x).to(torch.float8_e4m3fn),
    "complex": lambda x: torch.full((3,), complex(x, 1)).conj(),
    "gradient": lambda x: torch.full((2,), x, requires_grad=True),
    "part of a graph": lambda x: torch.ones(2, requires_grad=True) * x,
    "parameter": lambda x: torch.nn.Parameter(torch.full((2,), x)),
    "masked array": lambda x: np.ma.masked_array([1.0, x], [True, False]),
    "meta": lambda x: torch.ones(int(x), 3, device="meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(torch.ones(int(x))),
    "masked": lambda x: masked_tensor(torch.ones(int(x)), torch.ones(int(x), dtype=torch.bool)),
    "uninitialised": lambda x: UninitializedParameter(),
    "locked": lambda x: torch.ones(2).as_subclass(Locked),
    "unreadable": lambda x: Unreadable(),
}
"""Each made from a number: its content, or, of the last ones, at most its size."""


def make(kind: str, number: float = 1.0) -> Any:
    """Return a tensor without the warnings of torch about new layouts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ODD[kind](number)
