"""What a batch may contain, and that it comes back as it was."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.purity.comparison import compare
from hetero.batches.structure import conversion as structure
from hetero.batches.structure import leaves as leaf_module
from hetero.batches.structure.conversion import StructureLimits, UnsupportedBatchError, flatten, unflatten
from hetero.batches.structure.leaves import UnknownTypeError
from hetero.batches.structure.trees import LeafRef, ListTree, MappingTree, RecordTree, TupleTree
from hetero.errors import ExitCode, ProtocolError

torch = pytest.importorskip("torch")


class Pair(NamedTuple):
    image: Any
    label: Any


class EmptyPair(NamedTuple):
    pass


@dataclasses.dataclass
class Sample:
    text: str
    array: Any
    built: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.built += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Raised(Exception):
    value: int


@dataclasses.dataclass
class Guarded:
    value: int

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class Array(np.ndarray):
    pass


def round_trip(batch: Any) -> Any:
    tree, leaves = flatten(batch)
    for leaf in leaves:
        assert leaf.data.nbytes == leaf.nbytes
    copies = [dataclasses.replace(leaf, data=memoryview(bytearray(leaf.data))) for leaf in leaves]
    return unflatten(tree, copies)


TENSOR_DTYPES = (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
ARRAY_DTYPES = tuple(name for name in TENSOR_DTYPES if name != "bfloat16" and not name.startswith("float8"))

SAME = {
    "none": None,
    "bool is not int": [True, 1, False, 0],
    "ints beyond 64 bits": [2**63, -(2**63) - 1, 2**2046, [0] * 20 + [2**64]],
    "complex": [1j, complex(-0.0, float("inf"))],
    "sets": [{1}, set(), frozenset({("a", 1, None), 2.5}), {frozenset({b"x"}), True}],
    "keys of any plain type": {True: 1, None: 2, 2.5: 3, b"b": 4, ("a", (1, None)): 5, 2**70: 6, frozenset({1}): 7},
    "read-only mappings": [
        types.MappingProxyType({"a": np.arange(3)}),
        types.MappingProxyType(collections.OrderedDict(b=1, a=2)),
    ],
    "ints at the bounds": (2**63 - 1, -(2**63), 0),
    "floats": (0.0, -0.0, float("inf"), float("nan"), 5e-324),
    "empty text": ["", b""],
    "text with a zero": ("a\0b", b"a\0b"),
    "text beyond ASCII": "\N{SNOWMAN}\U0001f600",
    "long text": "\N{SNOWMAN}" * 300,
    "long bytes": bytes(range(256)) * 2,
    "text of few characters and many bytes": "\N{SNOWMAN}" * 200,
    "empty containers": [[], (), {}, collections.OrderedDict(), [[]], {"a": {}}],
    "list of str": ["a", "", "\N{SNOWMAN}"] * 5,
    "list of bytes": [b"", b"\xff"] * 8,
    "list of int": list(range(-10, 10)),
    "list of float": [float("nan"), -0.0, 1.5] * 4,
    "list of bool": [True, False] * 5,
    "short list of int": [1, 2, 3],
    "list of bool and int": [True, 1] * 8,
    "list of int and float": [1, 1.0] * 8,
    "list of None": [None] * 20,
    "tuple of int": tuple(range(20)),
    "dict in insertion order": {"b": 1, "a": 2, 3: "x", -1: None, "": 0},
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "namedtuple": Pair(image=np.arange(3), label=Pair(1, None)),
    "namedtuple without fields": EmptyPair(),
    "frozen dataclass": Frozen([Frozen(None)]),
    "dataclass that guards its attributes": Guarded(3),
    "array in Fortran order": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "array with negative strides": np.arange(12).reshape(3, 4)[::-1, ::-2],
    "array of no dimension": np.array(2.5),
    "empty array": np.empty((0, 3), np.int16),
    "empty array with a middle zero": np.empty((2, 0, 3), np.float32),
    "broadcast array": np.broadcast_to(np.float32(1), (3, 4)),
    "empty tensor": torch.empty(4, 0, dtype=torch.bfloat16),
    "tensor of no dimension": torch.tensor(7),
    "bfloat16 of no dimension": torch.tensor(1.5, dtype=torch.bfloat16),
    "transposed tensor": torch.arange(12).reshape(3, 4).t(),
    "transposed bfloat16": torch.arange(12).reshape(3, 4).to(torch.bfloat16).t(),
    "expanded tensor": torch.ones(1, 3).expand(5, 3),
    "conjugated view": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "conjugated and turned": torch.tensor([[1 + 2j, 3 - 4j]] * 3).mH,
    "array of text": np.array([["a", "\N{SNOWMAN}bc"], ["", "d\0e"]]),
    "array of text in Fortran order": np.asfortranarray([["a", "bc"], ["", "d"]]),
    "array of bytes": np.array([b"a", b"bc\0"])[::2],
    "array of dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "array of times in steps": np.arange(3).astype("m8[7ns]"),
    "empty array of text": np.empty((0, 2), "U5"),
    "NumPy scalars of text and dates": [
        np.str_("ab"),
        np.bytes_(b"c"),
        np.datetime64("2020-01-01T10:00"),
        np.timedelta64(3),
    ],
    "negated view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "sliced tensor": torch.arange(100)[3:50:7],
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    **{f"tensor of {name}": torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in TENSOR_DTYPES},
    **{f"array of {name}": np.arange(6).reshape(2, 3).astype(name) for name in ARRAY_DTYPES},
    **{f"scalar of {name}": np.dtype(name).type(1) for name in ARRAY_DTYPES},
}


@pytest.mark.parametrize("batch", SAME.values(), ids=SAME.keys())
def test_round_trip_every_kind_is_the_same(batch: Any) -> None:
    assert compare({"batch": batch}, round_trip({"batch": batch})) is None
    assert compare(batch, round_trip(batch)) is None


shapes = st.lists(st.integers(0, 4), max_size=5)
"""Mostly with dimensions of one element or none."""


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Permuted, sliced and expanded."""
    tensor = torch.arange(10_000)[: int(np.prod(shape := draw(shapes), dtype=int))].reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    for dim in range(tensor.ndim):
        change = draw(st.sampled_from(["nothing", "nothing", "every second", "one", "expand"]))
        if change == "every second":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "one":
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        elif change == "expand" and tensor.shape[dim] == 1:
            tensor = tensor.expand([3 if place == dim else size for place, size in enumerate(tensor.shape)])
    return tensor


@given(tensors())
def test_round_trip_tensor_has_the_strides_of_a_clone(tensor: Any) -> None:
    back, clone = round_trip(tensor), tensor.clone()
    assert back.stride() == clone.stride()
    assert torch.equal(back, clone)
    assert compare(back, tensor) is None


@given(tensors(), st.booleans())
def test_round_trip_array_has_the_strides_of_a_copy(tensor: Any, backwards: bool) -> None:
    array = tensor.numpy()[::-1] if backwards and tensor.ndim else tensor.numpy()
    back, copied = round_trip(array), array.copy(order="K")
    assert back.strides == copied.strides or not array.size
    assert np.array_equal(back, copied)
    assert compare(back, array) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(48.0).reshape(3, 1, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).to(torch.bfloat16).t(),
        torch.arange(96).reshape(2, 3, 2, 4, 2).permute(4, 0, 2, 1, 3),
        torch.arange(10)[2:8].reshape(2, 3).t(),
    ],
)
def test_flatten_dense_tensor_in_any_order_shares_its_memory(tensor: Any) -> None:
    _, [leaf] = flatten(tensor)
    before = bytes(leaf.data)
    tensor.add_(1)
    assert bytes(leaf.data) != before
    assert round_trip(tensor).stride() == tensor.stride()


def test_flatten_array_in_fortran_order_shares_its_memory() -> None:
    array = np.zeros((2, 3), np.uint8, order="F")
    _, [leaf] = flatten(array)
    array[1, 0] = 9
    assert leaf.data[1] == 9
    assert round_trip(array).flags.f_contiguous


@pytest.mark.attack("A3")
def test_round_trip_dataclass_runs_no_code_of_the_user() -> None:
    sample = Sample("a", np.arange(3))
    assert sample.built == 1
    assert compare(sample, round_trip(sample)) is None


def test_round_trip_read_only_array_comes_back_writable() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    back, tensor = round_trip((array, torch.arange(3)))
    back[0] = tensor[0] = 7
    assert back.tolist() == tensor.tolist() == [7, 1, 2]


def test_unflatten_read_only_leaf_copies_it() -> None:
    tree, leaves = flatten([np.arange(3), torch.arange(3)])
    read_only = [dataclasses.replace(leaf, data=memoryview(bytes(leaf.data))) for leaf in leaves]
    array, tensor = unflatten(tree, read_only)
    array[0] = tensor[0] = 7
    assert array.tolist() == tensor.tolist() == [7, 1, 2]


def test_flatten_contiguous_array_shares_its_memory() -> None:
    array = np.zeros(4, np.uint8)
    _, [leaf] = flatten(array)
    array[0] = 9
    assert leaf.data[0] == 9


def test_flatten_script_type_has_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is ``__main__`` in the trainer and has another name on endpoints."""
    on_endpoint, in_trainer = types.ModuleType("__hetero_script__"), types.ModuleType("__main__")
    for module in (on_endpoint, in_trainer):
        module.Pair = collections.namedtuple("Pair", "image label", module=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(structure, "_script_module", "__hetero_script__")
    tree, leaves = flatten(on_endpoint.Pair(1, 2))
    assert isinstance(tree, RecordTree)
    assert tree.module == ""
    structure.set_script_module("__main__")
    assert type(unflatten(tree, leaves)) is in_trainer.Pair


@dataclasses.dataclass
class Unset:
    value: int = dataclasses.field(init=False)


def local_type() -> Any:
    return collections.namedtuple("Hidden", "x")(1)


REFUSED = {
    "object": ({"a": [object()]}, r"batch\['a'\]\[0\]: object cannot be sent"),
    "set of records": ({Pair(1, 2)}, "batch: a set can be sent of numbers, short str"),
    "set of long text": ({"x" * 300}, "batch: a set can be sent of numbers, short str"),
    "path of a field": (Pair(1, Frozen(object())), r"batch\.label\.value: object"),
    "path in a set": ({object()}, r"batch\[\.\.\.\]: object cannot be sent"),
    "mapping of the user's": (collections.ChainMap({1: 2}), "ChainMap cannot be sent; convert it to dict"),
    "read-only mapping of another": (types.MappingProxyType(collections.defaultdict(int)), "cannot be sent"),
    "deque": (collections.deque([1]), "deque cannot be sent; convert it to list"),
    "key with a record": ({(Pair(1, 2),): 1}, "keys must be short str"),
    "long bytes as key": ({b"x" * 300: 1}, "keys must be short str"),
    "defaultdict": (collections.defaultdict(int), "convert it to dict"),
    "int too long": (10**4000, "an int of 13288 bits cannot be sent, at most 2047"),
    "big-endian array": (
        {"a": np.arange(3, dtype=">i4")},
        r"batch\['a'\]: ndarray of '>i4' cannot be sent; it is big-",
    ),
    "object array": (np.array([None]), r"'\|O'"),
    "text that ends in zeros": (np.str_("a\0"), "ends in zeros"),
    "characters beyond Unicode": (np.array([2**31], np.uint32).view("U1"), "characters beyond Unicode"),
    "big-endian text": (np.array(["a"], ">U1"), "it is big-endian"),
    "array of new text": (
        np.array(["a"], np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.array([None]),
        "list of str",
    ),
    "structured array": (np.zeros(2, [("a", "i4")]), "convert it to one of"),
    "long double": (np.longdouble(1), "convert it to one of"),
    "masked array": (np.ma.masked_array([1, 2]), "numpy.asarray"),
    "array subclass": (np.zeros(2).view(Array), "numpy.asarray"),
    "parameter": (torch.nn.Parameter(torch.zeros(2)), "as_subclass"),
    "tensor with gradient": (torch.zeros(2, requires_grad=True), "detach"),
    "tensor elsewhere": (torch.zeros(2, device="meta"), "on meta"),
    "sparse tensor": (torch.eye(2).to_sparse(), "to_dense"),
    "invalid bool": (np.array([2, 1], np.uint8).view(bool), "neither 0 nor 1"),
    "lone surrogate": (["ok", "\udc80"], r"batch\[1\]: a str has no UTF-8 form"),
    "lone surrogate in a list": (["\udc80"] * 9, "UTF-8"),
    "long key": ({"k" * 257: 1}, "at most 256 bytes"),
    "surrogate in key": ({"\udc80": 1}, "at most 256 bytes"),
    "9 dimensions": (np.zeros((1,) * 9), "9 dimensions"),
    "type inside a function": (local_type(), "top level"),
    "exception that is a dataclass": (Raised(1), "Raised cannot be sent"),
    "field without value": (Unset(), "no value in field 'value'"),
    "absurd stride": (torch.zeros(9).as_strided((1, 3, 2), (2**50, 1, 3)), "contiguous"),
    "expanded beyond the limit": (torch.zeros(1, dtype=torch.uint8).expand(2**31), "2147483648 bytes"),
    "empty with absurd dimensions": (np.empty((0, 2**40), np.uint8), "bytes"),
    "tuple of too many": (tuple(range(20_000)), "more than 16384 parts"),
    "too many arrays": ([np.zeros(1)] * 1025, "more than 1024"),
    "type": (int, "type cannot be sent"),
}


@pytest.mark.parametrize(("batch", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_flatten_unsupported_value_is_refused_with_its_path(batch: Any, message: str) -> None:
    with pytest.raises(UnsupportedBatchError, match=message) as caught:
        flatten(batch)
    assert str(caught.value).startswith("batch")


def test_flatten_batch_within_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedBatchError, match="nests deeper than 8 levels"):
        flatten(endless)


def test_flatten_nesting_at_the_limit_is_accepted() -> None:
    batch: Any = np.zeros(1)
    for _ in range(8):
        batch = [batch]
    assert compare(batch, round_trip(batch)) is None
    with pytest.raises(UnsupportedBatchError, match="deeper"):
        flatten([batch])


def test_flatten_more_bytes_or_items_than_allowed_is_refused() -> None:
    flatten([np.zeros(10, np.uint8), b""], StructureLimits(max_batch_bytes=10))
    with pytest.raises(UnsupportedBatchError, match=r"batch\[1\]: 6 bytes, but only 5 are left of the 10 that"):
        flatten([np.zeros(5, np.uint8), np.zeros(6, np.uint8)], StructureLimits(max_batch_bytes=10))
    with pytest.raises(UnsupportedBatchError, match="more than 15 items"):
        flatten([[1] * 8, [2] * 8], StructureLimits(max_list_items=15))


MALFORMED = {
    "leaf out of order": ListTree((LeafRef(1), LeafRef(0))),
    "leaf twice": ListTree((LeafRef(0), LeafRef(0))),
    "leaf forgotten": ListTree((LeafRef(0),)),
    "leaf that is not there": ListTree((LeafRef(0), LeafRef(1), LeafRef(2))),
}

UNKNOWN = {
    "module that is not imported": (
        RecordTree("no.such.module", "Type", ("a", "b"), (LeafRef(0), LeafRef(1))),
        r"'Type' of the module 'no.such.module', which .* not imported\n  Write 'import no.such.module' at the top",
    ),
    "no type": (RecordTree("os", "getcwd", ("a", "b"), (LeafRef(0), LeafRef(1))), "finds none"),
    "no record": (RecordTree("subprocess", "Popen", ("args",), (LeafRef(0),)), r"other fields than here\n .*'args'"),
    "behind an attribute": (RecordTree("os", "path.join", (), ()), "finds none"),
    "none in the script": (RecordTree("", "Type", (), ()), "a 'Type' of the script, where this process finds none"),
    "other fields": (RecordTree(__name__, "Pair", ("label", "image"), (LeafRef(0), LeafRef(1))), "other fields"),
}


@pytest.mark.attack("A7")
@pytest.mark.parametrize("tree", MALFORMED.values(), ids=MALFORMED.keys())
def test_unflatten_malformed_tree_is_a_protocol_error(tree: Any) -> None:
    _, leaves = flatten((np.zeros(1), np.ones(1)))
    with pytest.raises(ProtocolError):
        unflatten(tree, leaves)


@pytest.mark.attack("A7")
@pytest.mark.parametrize(("tree", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unflatten_record_unknown_here_is_the_users_error(tree: Any, message: str) -> None:
    _, leaves = flatten((np.zeros(1), np.ones(1)))
    with pytest.raises(UnknownTypeError, match=message) as caught:
        unflatten(tree, leaves)
    assert caught.value.exit_code is ExitCode.USAGE
    assert len(str(caught.value).splitlines()[0]) <= 120


def test_unflatten_tensor_unknown_here_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, leaves = flatten(torch.zeros(1, dtype=torch.bfloat16))
    for known, message in (
        ({"f32": torch.float32}, "a torch that has no such dtype"),
        ({}, "and this process has no torch"),
    ):
        monkeypatch.setattr(leaf_module, "_torch_dtypes", lambda known=known: known)
        with pytest.raises(UnknownTypeError, match=message):
            unflatten(tree, leaves)


def test_tree_values_stand_for_themselves() -> None:
    tree, leaves = flatten({"a": [1, None], "b": (True, np.zeros(1))})
    assert tree == MappingTree(("a", "b"), (ListTree((1, None)), TupleTree((True, LeafRef(0)))), ordered=False)
    assert [leaf.dtype for leaf in leaves] == ["f64"]


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys], ids=["set", "frozenset", "dict"])
def test_flatten_more_than_64_equal_hashes_are_refused(make: Any) -> None:
    colliding = [1 + number * (2**61 - 1) for number in range(9, 74)]
    with pytest.raises(UnsupportedBatchError, match=r"^batch\[0\]: more than 64 keys or items .* have the same hash"):
        flatten([make(colliding)])
    flatten(make(colliding[1:]))


def test_flatten_powers_of_two_and_many_long_integers_are_kept() -> None:
    for batch in ({1 << power for power in range(2040)}, dict.fromkeys(3**200 + number for number in range(3000))):
        assert unflatten(*flatten(batch)) == batch
