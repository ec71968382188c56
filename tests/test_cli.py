"""The command line as a whole: what it prints, and the exit code of what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero import cli
from hetero.errors import ExitCode

Capture = pytest.CaptureFixture[str]
GROUPS = [
    {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]},
    {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-2"]},
]


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that a training platform fills; it has no description of the cluster yet."""
    (tmp_path / "input" / "config").mkdir(parents=True)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    return tmp_path


def launch(platform: Path, *flags: str, script_text: str | None = "import hetero\n") -> int:
    """Run the command in this process."""
    script = platform / "train.py"
    if script_text is not None:
        script.write_text(script_text)
    return cli.main(["launch", *flags, str(script)])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, ["resourceconfig.json does not exist", "use hetero simulate", "--cluster-file FILE --host NAME"]),
        ("{", ["resourceconfig.json", "is not JSON", "found:", "expected:"]),
        ("[]", ["resourceconfig.json", "expected:"]),
        (json.dumps({"current_host": "algo-9", "instance_groups": GROUPS}), ["algo-9", "algo-1"]),
    ],
    ids=["missing", "no JSON", "no object", "host in no group"],
)
def test_launch_without_a_usable_description_ends_with_its_code(
    platform: Path, document: str | None, words: list[str], capsys: Capture
) -> None:
    if document is not None:
        (platform / "input" / "config" / "resourceconfig.json").write_text(document)
    assert launch(platform) == ExitCode.CLUSTER
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert (platform / "output" / "failure").read_text().startswith("HET-10 ")


@pytest.mark.parametrize(
    ("role", "code", "words"),
    [
        ("dta_group=data", ExitCode.CLUSTER, "did you mean 'data_group'"),
        ("data_group=worker", ExitCode.USAGE, "expected GROUP=data or GROUP=trainer"),
    ],
)
def test_launch_with_unknown_group_or_role_ends_with_its_code(
    platform: Path, role: str, code: ExitCode, words: str, capsys: Capture
) -> None:
    document = json.dumps({"current_host": "algo-1", "instance_groups": GROUPS})
    (platform / "input" / "config" / "resourceconfig.json").write_text(document)
    assert launch(platform, "--role", role) == code
    assert words in capsys.readouterr().err


def test_prices_show_of_an_unknown_type_says_what_to_do(capsys: Capture) -> None:
    assert cli.main(["prices", "show", "ml.p99.huge"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "'ml.p99.huge' is not in the catalogue" in error
    assert "hetero prices list" in error
    assert "--price" in error


def test_prices_list_and_show_print_what_is_known(capsys: Capture) -> None:
    assert cli.main(["prices", "list", "--price-profile", "seed-2022"]) == ExitCode.OK
    assert "| ml.p3.2xlarge " in capsys.readouterr().out
    assert cli.main(["prices", "show", "ml.c5.9xlarge", "--price", "ml.c5.9xlarge=1.5"]) == ExitCode.OK
    assert "1.5 USD/hour" in capsys.readouterr().out


def test_report_that_does_not_exist_ends_with_its_code(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["report", str(tmp_path), str(tmp_path)]) == ExitCode.USAGE
    assert "report.json" in capsys.readouterr().err
