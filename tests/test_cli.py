"""The command line as a whole: what it prints, and the exit codes of errors."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
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
    """Return the folder that a training platform fills, without a description of the cluster."""
    (tmp_path / "input" / "config").mkdir(parents=True)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    return tmp_path


def launch(platform: Path, *flags: str, script_text: str | None = "import hetero\n") -> int:
    """Run the command in this process."""
    script = platform / "train.py"
    if script_text is not None:
        script.write_text(script_text)
    return cli.main(["launch", *flags, str(script)])


@pytest.mark.parametrize("place", ["train.py/run", "/proc", "/proc/run"], ids=["below a file", "there", "not there"])
@pytest.mark.parametrize("command", ["launch", "simulate", "profile"])
def test_output_folder_that_cannot_be_written_is_refused_before_the_job(
    platform: Path, command: str, place: str, capsys: Capture
) -> None:
    document = {"current_host": "algo-1", "instance_groups": GROUPS}
    (platform / "input" / "config" / "resourceconfig.json").write_text(json.dumps(document))
    (platform / "train.py").write_text("raise SystemExit('this must not run')\n")
    flags = {"launch": ["--start-timeout", "1"], "simulate": ["--group", "dnn=ml.p3.2xlarge:1"], "profile": []}
    folder = str(platform / place)
    line = [command, *flags[command], "--output-dir", folder, str(platform / "train.py")]
    assert cli.main(line) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"HET-02: cannot write to {folder}: " in error
    assert "give another folder to --output-dir" in error


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "compare", "A", "B"], "unexpected argument 'B'; see --help\n"),
        (["report", "--price=x=1", "A"], "unknown flag --price; see --help.\n"),
    ],
)
def test_command_without_a_script_does_not_speak_of_its_arguments(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    assert cli.main(arguments) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(message)


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


def test_faults_in_a_cluster_of_ones_own_are_refused_unless_they_are_allowed(
    platform: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cluster_file = platform / "cluster.json"
    cluster_file.write_text(json.dumps({"instance_groups": GROUPS}))
    monkeypatch.setenv("HETERO_FAULTS", "send:corrupt")
    flags = ["--cluster-file", str(cluster_file), "--host", "algo-1"]
    assert launch(platform, *flags) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "cluster.json describes its cluster" in error
    assert "--allow-faults" in error


def test_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hetero", "--version"], capture_output=True, check=True, text=True)
    assert done.stdout.startswith("hetero ")


_SHOW = "import sys; from hetero import cli; sys.exit(cli.main(sys.argv[1:]))"


def run_command(*arguments: str, redirect: str) -> int:
    """Run the command in another process behind a shell's redirections. Return its exit code."""
    words = shlex.join([sys.executable, "-c", _SHOW, *arguments])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words} {redirect}"], check=False, timeout=100)
    return done.returncode


@pytest.mark.fault("F37")
@pytest.mark.parametrize(
    "redirect", ["2>&-", "2>/dev/full", "2> >(exec 0<&-; sleep 0)"], ids=["closed", "full", "gone"]
)
def test_code_of_an_error_stays_where_nobody_reads_standard_error(redirect: str) -> None:
    assert run_command("prices", "show", "ml.p99.huge", redirect=redirect) == ExitCode.USAGE


@pytest.mark.fault("F37")
def test_code_of_a_command_whose_reader_has_gone_is_that_of_a_broken_pipe() -> None:
    # The reader is gone before anything is written. This little text fits into Python's buffer.
    program = f"import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w); {_SHOW}"
    done = subprocess.run(
        [sys.executable, "-c", program, "prices", "show", "ml.c5.xlarge"], stderr=subprocess.PIPE, check=False
    )
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr
    assert done.stderr == b""


@pytest.mark.fault("F37")
@pytest.mark.parametrize(
    ("arguments", "redirect", "code", "said"),
    [
        (["prices", "show", "ml.c5.xlarge"], ">&-", 0, ""),
        (["prices", "show", "ml.c5.xlarge"], ">/dev/full", 128 + signal.SIGPIPE, "No space left on device"),
        (["--help"], ">/dev/full", 128 + signal.SIGPIPE, "No space left on device"),
    ],
    ids=["closed", "full", "help, full"],
)
def test_command_whose_output_goes_nowhere_ends_without_a_traceback(
    tmp_path: Path, arguments: list[str], redirect: str, code: int, said: str
) -> None:
    error = tmp_path / "error"
    assert run_command(*arguments, redirect=f"{redirect} 2>{shlex.quote(str(error))}") == code
    assert error.read_text() == (f"hetero: cannot write to standard output: {said}\n" if said else "")
