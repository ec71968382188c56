"""The registry and the specs."""

from __future__ import annotations

import enum
import pickle
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import datasets
from hetero.datasets import build, dataset, get_factory, registered
from hetero.errors import ConfigError, DatasetError
from hetero.spec import DatasetSpec, set_describer


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets, "_factories", {})
    yield
    set_describer(None)


def photos(root: str, split: str = "train", sizes: Any = (1, 2), **options: Any) -> list[int]:
    return list(range(7))


def test_factory_called_returns_canonical_spec() -> None:
    factory = dataset(photos)
    spec = factory("/data", sizes=(3, (4.5, None)), zoom=True)
    assert spec == DatasetSpec("photos", '{"root":"/data","sizes":[3,[4.5,null]],"split":"train","zoom":true}')
    assert spec == factory(zoom=True, sizes=[3, [4.5, None]], root="/data")
    assert spec.arguments == {"root": "/data", "split": "train", "sizes": [3, [4.5, None]], "zoom": True}
    assert str(spec).startswith("photos(")


def test_factory_argument_that_is_a_dict_keeps_its_order() -> None:
    @dataset
    def datasets_test_classes(classes: dict[str, dict[str, int]], root: str) -> list[str]:
        return [*classes, *classes["dog"]]

    spec = datasets_test_classes(root="/data", classes={"dog": {"tall": 1, "short": 0}, "cat": {}})
    assert get_factory(spec.name).function(**spec.arguments) == ["dog", "cat", "tall", "short"]
    assert spec == datasets_test_classes(classes={"dog": {"tall": 1, "short": 0}, "cat": {}}, root="/data")


def test_second_data_set_of_a_name_is_refused_with_both_places() -> None:
    @dataset(name="twice")
    def datasets_test_first() -> list[int]:
        return []

    with pytest.raises(ConfigError) as caught:

        @dataset(name="twice")
        def datasets_test_second() -> list[int]:
            return []

    assert "two data sets are named 'twice'" in str(caught.value)
    assert str(caught.value).count("test_datasets.py") == 2


def test_spec_is_hashable_and_survives_pickling() -> None:
    spec = dataset(photos)("a")
    assert {spec: 1}[pickle.loads(pickle.dumps(spec))] == 1


def test_spec_len_without_describer_builds_once() -> None:
    calls = []

    @dataset
    def counted(size: int) -> list[int]:
        calls.append(size)
        return list(range(size))

    assert (len(counted(5)), len(counted(5)), calls) == (5, 5, [5])


def test_spec_len_is_that_of_the_data_set_that_is_built_and_leaves_generators_alone() -> None:
    @dataset
    def drawn() -> range:
        return range(random.randrange(10, 10**6))

    before = random.getstate()
    assert len(drawn()) == len(build(drawn()).dataset)
    assert random.getstate() == before


def test_spec_len_of_failing_factory_names_the_data_set() -> None:
    @dataset
    def broken() -> None:
        raise OSError("gone")

    with pytest.raises(DatasetError, match="'broken' failed in this process while it was built: OSError: gone"):
        len(broken())


def test_spec_len_with_describer_asks_it() -> None:
    set_describer(lambda spec: len(spec.name))
    assert len(DatasetSpec("abc")) == 3


def test_spec_as_data_source_feeds_torch_samplers() -> None:
    data = pytest.importorskip("torch.utils.data")
    spec = dataset(photos)("a")
    assert sorted(data.RandomSampler(spec)) == list(range(7))
    assert list(data.SequentialSampler(spec)) == list(range(7))
    assert len(list(data.distributed.DistributedSampler(spec, num_replicas=2, rank=0))) == 4


class Colour(str, enum.Enum):
    RED = "red"


def test_factory_with_subclasses_of_json_types_takes_their_values() -> None:
    arguments = dataset(photos)(Colour.RED, sizes=np.float64(0.5)).arguments
    assert (arguments["root"], arguments["sizes"]) == ("red", 0.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Path("/data"), r"photos\(sizes\) is a pathlib\.\S+, not a JSON value\n.*str\(path\)"),
        ([0, {"a": {1, 2}}], r"photos\(sizes\)\[1\]\['a'\] is a builtins.set"),
        ({"a": float("nan")}, r"photos\(sizes\)\['a'\] is nan"),
        ([float("-inf")], r"photos\(sizes\)\[0\] is -inf"),
        ({3: 1}, r"photos\(sizes\) has the key 3 of type int"),
        (np.int64(3), r"numpy.int64.*\n.*\.item\(\)"),
        (2**64, r"integer of 65 bits"),
        (b"abc", r"builtins.bytes"),
        (len, r"build it inside"),
    ],
)
def test_factory_with_unfit_argument_names_its_path(value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        dataset(photos)("a", sizes=value)


def test_factory_with_cyclic_argument_raises() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="deeper than 32"):
        dataset(photos)("a", sizes=cycle)


def test_factory_with_large_arguments_raises() -> None:
    with pytest.raises(ConfigError, match="at most 65536"):
        dataset(photos)("x" * 70_000)


def test_factory_with_wrong_arguments_shows_signature() -> None:
    with pytest.raises(ConfigError, match=r"missing a required argument: 'root'; its signature is photos\(root"):
        dataset(photos)()


def test_factory_with_unfit_default_names_it() -> None:
    @dataset
    def rooted(root: Any = Path()) -> None: ...

    with pytest.raises(ConfigError, match=r"rooted\(root\)"):
        rooted()


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 30_000, "3"])
def test_spec_arguments_with_malformed_json_raise(text: str) -> None:
    with pytest.raises(ConfigError, match="photos"):
        _ = DatasetSpec("photos", text).arguments


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "../../etc", "a\nb"])
def test_spec_with_malformed_name_raises(name: str) -> None:
    with pytest.raises(ConfigError, match="is not 1 to 128"):
        DatasetSpec(name)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_spec_arguments_round_trip(value: Any) -> None:
    datasets._factories.clear()
    assert dataset(photos)("a", sizes=value).arguments["sizes"] == value


def test_dataset_with_options_registers_them() -> None:
    @dataset(name="mine", seeding="batch", collate_fn=list, worker_init_fn=print, fingerprint="v1")
    def anything() -> None: ...

    factory = get_factory("mine")
    assert factory == anything
    assert (factory.seeding, factory.collate_fn, factory.fingerprint) == ("batch", list, "v1")
    assert registered() == ("mine",)


def test_dataset_of_taken_name_names_both_places() -> None:
    dataset(photos)

    def other() -> None: ...

    here = Path(__file__).name
    with pytest.raises(ConfigError, match=rf"First: .*{here}:\d+\n  Second: .*{here}:\d+"):
        dataset(name="photos")(other)


def test_dataset_of_script_imported_twice_is_allowed() -> None:
    source = "def twin(): pass"
    for module in ("__main__", "script"):
        namespace: dict[str, Any] = {"__name__": module}
        exec(compile(source, "/tmp/script.py", "exec"), namespace)
        dataset(namespace["twin"])
    assert get_factory("twin").function.__module__ == "script"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def main():\n    hetero.dataset(name='inner')(lambda: [])\nif __name__ == '__main__':\n    main()", 5),
        ("if __name__ == '__main__':\n    hetero.dataset(name='inner')(lambda: [])", 3),
        ("def make():\n    hetero.dataset(name='inner')(lambda: [])\nmake()", None),
    ],
)
def test_data_set_that_only_main_registers_is_said(
    text: str, line: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import hetero\n{text}\n")
    runpy.run_path(str(script), run_name="__main__")
    said = [record.getMessage() for record in caplog.records]
    assert [f"data set 'inner' is registered by line {line}, under if" in each for each in said] == [True] * bool(line)


def test_get_factory_of_unknown_name_suggests() -> None:
    dataset(photos)
    with pytest.raises(ConfigError, match=r"(?s)'photo' is registered; did you mean 'photos'\?.*Registered: photos\."):
        get_factory("photo")


def test_dataset_on_class_raises() -> None:
    with pytest.raises(ConfigError, match="decorates a function"):
        dataset(type("Photos", (), {}))


def test_dataset_with_positional_only_parameter_raises() -> None:
    def positional(root: str, /) -> None: ...

    def many(*roots: str) -> None: ...

    for function in (positional, many):
        with pytest.raises(ConfigError, match="cannot be passed by name"):
            dataset(function)


def test_dataset_with_unknown_seeding_raises() -> None:
    with pytest.raises(ConfigError, match="seeding is 'epoch'"):
        dataset(seeding="epoch")(photos)  # type: ignore[call-overload]


def test_datasets_imported_pulls_in_no_heavy_module() -> None:
    code = "import hetero.datasets, sys; print([m for m in ('numpy', 'torch', 'grpc') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"
