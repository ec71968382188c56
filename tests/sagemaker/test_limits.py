"""The shipped limits are those of the service's own model, as botocore has it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hetero.sagemaker.limits import breaches, limits, values_at
from hetero.sagemaker.request import TrainingRequest
from tests.support.sagemaker.estimators import clean

session = pytest.importorskip("botocore.session")
LIMITS = limits()


@pytest.fixture(scope="module")
def model() -> Any:
    return session.Session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def shape_at(shape: Any, path: str) -> Any:
    for name, step in re.findall(r"(\w+)|(\[\]|\{keys\}|\{\})", path.replace("{keys}", "{keys}")):
        if name and name != "keys":
            shape = shape.members[name]
        elif step == "[]":
            shape = shape.member
        else:
            shape = shape.key if step == "{keys}" else shape.value
    return shape


@pytest.mark.parametrize("path", LIMITS)
def test_limit_is_that_of_the_model(path: str, model: Any) -> None:
    limit, shape = LIMITS[path], shape_at(model, path)
    kind = {"list": "items", "map": "items", "string": "characters", "integer": "number"}[shape.type_name]
    assert limit.counts in (kind, "")
    if path != "StoppingCondition.MaxRuntimeInSeconds":
        assert limit.high == shape.metadata.get("max")
    assert limit.low in (shape.metadata.get("min"), None)
    assert limit.low is not None or not shape.metadata.get("min")
    assert sorted(limit.values) == sorted(shape.metadata.get("enum", ()))
    if limit.pattern is not None:
        assert limit.pattern == shape.metadata["pattern"]
    assert limit.source.startswith("https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_")


def test_longest_run_is_in_the_words_of_the_model(model: Any) -> None:
    words = shape_at(model, "StoppingCondition.MaxRuntimeInSeconds").documentation
    limit = LIMITS["StoppingCondition.MaxRuntimeInSeconds"]
    assert limit.high is not None
    assert f"maximum value is {limit.high // 86400} days" in words
    assert "default value is 1 day" in words  # what the rule SM-09 says


def test_types_of_the_catalogue_are_those_that_train(model: Any) -> None:
    from hetero.pricing import Catalogue

    trained = set(shape_at(model, "ResourceConfig.InstanceType").enum)
    names = (info.instance_type for info in Catalogue.load().types())
    ours = {name for name in names if name.startswith("ml.")}
    assert sorted(ours - trained) == []


def test_values_at_yields_every_value_with_its_path() -> None:
    document = {"A": [{"B": {"x": "1", "y": "2"}}, {"B": {}}, {}, 3], "C": "4"}
    assert list(values_at(document, "A[].B{}")) == [("A[0].B['x']", "1"), ("A[0].B['y']", "2")]
    assert list(values_at(document, "A[].B{keys}")) == [("A[0].B['x']", "x"), ("A[0].B['y']", "y")]
    assert list(values_at(document, "C")) == [("C", "4")]
    assert list(values_at(document, "C[]")) == list(values_at(document, "D.E")) == []


@pytest.mark.parametrize("path", LIMITS)
def test_clean_request_is_within_every_limit(path: str) -> None:
    assert breaches(clean(), LIMITS[path]) is None


def test_breach_says_where_and_how_much_and_not_what() -> None:
    document = clean()
    document["Environment"] = {f"N{index}": "s3cret" * 100 for index in range(5)}
    TrainingRequest.parse(document)
    text = breaches(document, LIMITS["Environment{}"])
    assert text is not None
    assert text.startswith("Environment['N0']: found 600 characters, expected at most 512; ")
    assert text.endswith(", and 2 more")
    assert "s3cret" not in text
