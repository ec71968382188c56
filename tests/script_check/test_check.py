"""``hetero check SCRIPT`` names the line of each fault, and finds nothing in scripts that are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetero import cli
from tests.support.script_check import FAULTS, NUMBERS, NUMBERS_FACTORY, RIGHT, script
from tests.support.shards import write_shards

pytestmark = pytest.mark.integration

QUICK_FAULTS = (
    "a factory in a function",
    "fewer shards than lanes",
    "an own generator",
    "state of a collate_fn",
    "a data set with set_epoch",
    "a relative path",
)
QUICK_RIGHT = ("a sampler with set_epoch", "a process group and a state")
EXAMPLES = Path(__file__).parents[2] / "examples"


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetero", "check", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def written(folder: Path, text: str) -> Path:
    (folder / "number.txt").write_text("7")
    (folder / "train.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    "fault",
    [each if each in QUICK_FAULTS else pytest.param(each, marks=pytest.mark.long) for each in FAULTS],
)
def test_fault_is_named_with_its_line(fault: str, tmp_path: Path) -> None:
    text = FAULTS[fault]
    (line,) = (number for number, each in enumerate(text.splitlines(), 1) if "# here" in each)
    done = check(written(tmp_path, text), "train.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"train.py:{line}: " in done.stdout


@pytest.mark.parametrize(
    "name", [each if each in QUICK_RIGHT else pytest.param(each, marks=pytest.mark.long) for each in RIGHT]
)
def test_right_script_has_no_findings(name: str, tmp_path: Path) -> None:
    done = check(written(tmp_path, RIGHT[name]), "train.py")
    assert (done.returncode, done.stdout[:16]) == (0, "nothing found in"), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "script", ["mnist/train.py", "frameworks/with_accelerate.py", "frameworks/with_lightning.py", "keras/train.py"]
)
def test_examples_have_no_findings(script: str, tmp_path: Path) -> None:
    done = check(tmp_path, str(EXAMPLES / script))
    assert done.returncode == 0, done.stdout + done.stderr


def test_script_that_fails_or_takes_no_batch_is_not_said_to_be_right(tmp_path: Path) -> None:
    text = script(NUMBERS, NUMBERS_FACTORY, "def main():\n    pass\n")
    done = check(written(tmp_path, text), "--json", "train.py")
    (finding,) = json.loads(done.stdout)
    assert "took no batch" in finding["what"]
    text = text.replace("    pass\n", "    raise KeyError('lr')\n")
    done = check(written(tmp_path, text), "-m", "train")
    assert done.returncode == 1
    line = text[: text.index("raise KeyError")].count("\n") + 1
    assert f"train.py:{line}: the script raises KeyError: 'lr'" in done.stdout


def test_missing_and_changed_shards_are_named(tmp_path: Path) -> None:
    text = (
        script("""
        @hetero.dataset
        def rows():
            return hetero.Sources(text=hetero.shards.jsonl("/FOLDER/shard-{000..002}.jsonl").map(lambda row: row["id"]))

        def main():
            list(DataLoader(rows(), batch_size=4))
    """)
        .replace("/FOLDER", str(tmp_path))
        .replace("import hetero\n", "import hetero, hetero.shards\n")
    )
    first, second, _ = write_shards(tmp_path, "jsonl", [40, 30, 30])
    assert cli.main(["index", str(tmp_path / "*.jsonl"), "--processes=1"]) == 0
    done = check(written(tmp_path, text), "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    Path(first).rename(tmp_path / "away")
    Path(second).write_bytes(Path(second).read_bytes()[:-10])
    done = check(tmp_path, "train.py")
    assert done.returncode == 1
    line = text.splitlines().index("def rows():") + 2
    assert f"train.py:{line}: 2 of 3 shards cannot be used" in done.stdout
    assert f"The first: cannot read {first}: No such file" in done.stdout


@pytest.mark.parametrize("opening", ["shards.jsonl(pattern)", "sorted(Path().glob(pattern))"])
def test_relative_pattern_that_finds_nothing_on_data_hosts_gets_advice(opening: str, tmp_path: Path) -> None:
    text = f"""
import hetero
from pathlib import Path
from hetero import shards
from hetero.torch import DataLoader

@hetero.dataset
def files(pattern):
    return {opening}

if __name__ == "__main__":
    list(DataLoader(files("*.txt"), batch_size=1))
"""
    done = check(written(tmp_path, text), "--json", "train.py")
    (finding,) = json.loads(done.stdout)
    assert "a relative path in its own folder" in finding["to_do"]


def test_script_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    done = check(tmp_path, "missing.py")
    assert done.returncode == 2
    assert "missing.py" in done.stderr
