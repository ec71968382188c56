"""The language model on a mixture of shards: alone, as a simulated job, and stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.example_runs import ExampleRuns

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

Script = Callable[[str], ModuleType]
OPTIONS = ("--samples=160", "--batch-size=8", "--length=32", "--epochs=3", "--log-every=1")
PATTERNS = ("data/tokens/stories/*.jsonl.gz", "data/tokens/reports/*.parquet")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ExampleRuns:
    """Return the runs of the example, with its data."""
    runs = ExampleRuns(name="tokens", folder=tmp_path_factory.mktemp("tokens"), options=OPTIONS)
    runs.make_data("--rows=200", patterns=PATTERNS)
    return runs


@pytest.fixture(scope="module")
def lines_alone(runs: ExampleRuns) -> list[str]:
    """Return what the script prints alone, without a stop."""
    return runs.alone()


@pytest.mark.integration
def test_loss_falls(lines_alone: list[str]) -> None:
    losses = [float(line.rpartition(" ")[2]) for line in lines_alone]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.integration
def test_script_alone_resumes_the_simulated_job(runs: ExampleRuns, lines_alone: list[str]) -> None:
    first = runs.simulated_until(10, "--checkpoint=checkpoint.pt")
    assert 10 <= len(first) < 60
    assert first + runs.alone("--checkpoint=checkpoint.pt") == lines_alone


def test_sample_is_a_part_of_its_row(runs: ExampleRuns, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.folder)
    module = script("tokens/train.py")
    pack = module.Pack("data/tokens/tokenizer.json", 20)
    row = {"documents": ["The fox left the bridge.", "rain=3 snow=4 total=7"] * 3}
    text = "".join(f"{document}<|endoftext|>" for document in row["documents"])
    assert pack.tokenizer.decode(pack(row).tolist(), skip_special_tokens=False) in text
    with pytest.raises(ValueError, match="expected at least 20: lower --length"):
        pack({"documents": ["The fox"]})


def test_data_is_the_same_in_every_run_and_other_in_every_shard(script: Script, tmp_path: Path) -> None:
    make_data = script("tokens/make_data.py")
    for name in ("a", "b"):
        make_data.write_data(tmp_path / name, rows=6, shards=2)
    rows = [list(make_data.make_rows(make_data.make_story, f"stories {shard}", 3)) for shard in (0, 0, 1)]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) != json.dumps(rows[2])
    for path in (tmp_path / "a").glob("*/*.parquet"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
