"""Versions: floors, and those that are known to be bad."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero.doctor import Level
from hetero.doctor.examination import SUBJECTS
from hetero.doctor.versions import FLOORS, KNOWN_BAD, KnownBad, examine, judge
from tests.support.doctor import here, run_doctor

GOOD = {
    **FLOORS,
    "grpcio": "1.85.1",
    "protobuf": "6.33.6",
    "numpy": "2.4.6",
    "torch": "2.13.0+cpu",
    "sagemaker": "2.257.7",
}
ROOT = Path(__file__).parents[2]


def test_floors_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert dict(re.findall(r'"([A-Za-z]+)>=([0-9.]+)"', block)) == FLOORS


def test_good_set_and_this_environment_have_no_finding(tmp_path: Path) -> None:
    assert list(judge(GOOD)) == []
    (only,) = examine(here(tmp_path))
    assert only.level is Level.OK
    assert "grpcio 1." in only.found


@pytest.mark.parametrize("rule", KNOWN_BAD, ids=lambda rule: f"{rule.package}-{rule.below}")
def test_known_bad_version_is_found_and_its_neighbours_are_not(rule: KnownBad) -> None:
    beside = {rule.with_package: rule.with_at_least} if rule.with_package else {}
    first = rule.at_least if rule.at_least != "0" else "2.2.1"
    (diagnosis,) = judge({**GOOD, **beside, rule.package: first})
    assert diagnosis.level is rule.level
    assert diagnosis.found.startswith(f"{rule.package} {first}")
    assert diagnosis.to_do
    assert str(diagnosis.details["source"]).startswith("https://")
    assert list(judge({**GOOD, **beside, rule.package: rule.below})) == []


def test_protobuf_7_is_fine_without_the_sdk() -> None:
    assert (
        list(judge({name: version for name, version in {**GOOD, "protobuf": "7.36.2"}.items() if name != "sagemaker"}))
        == []
    )


def test_torch_of_numpy_1_is_fine_beside_numpy_1() -> None:
    assert list(judge({**GOOD, "torch": "2.2.2", "numpy": "1.26.4"})) == []


@pytest.mark.parametrize(("name", "version"), [("grpcio", "1.48.2"), ("numpy", "1.23.5"), ("torch", "2.0.1+cu118")])
def test_version_below_its_floor_is_an_error(name: str, version: str) -> None:
    (diagnosis,) = judge({**GOOD, "numpy": "1.26.4", name: version})
    assert diagnosis.level is Level.ERROR
    assert f"{name} is {version}; expected" in diagnosis.found


def test_package_that_is_not_there_is_an_error_only_if_it_is_needed() -> None:
    (diagnosis,) = judge({name: version for name, version in GOOD.items() if name not in ("xxhash", "torch")})
    assert diagnosis.found == "xxhash is not installed; hetero needs it"


def test_command_with_an_old_grpcio_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "grpcio-1.48.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: grpcio\nVersion: 1.48.2\n")
    status, found = run_doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert status == 1
    assert [each["found"][:14] for each in found["versions"] if each["level"] == "error"] == ["grpcio is 1.48"]


def test_command_with_a_grpcio_that_cannot_be_imported_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "grpc").mkdir()
    (tmp_path / "grpc/__init__.py").write_text("raise ImportError('libstdc++.so.6: version not found')\n")
    status, found = run_doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert status == 1
    assert list(found) == list(SUBJECTS)
    assert "grpc cannot be imported: ImportError: libstdc++.so.6: version not found" in found["versions"][1]["found"]
    assert found["disk"][0]["level"] == "ok"
