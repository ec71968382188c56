"""The example in docs/planning.md: its script and its commands, as a newcomer would run them."""

from __future__ import annotations

import re
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hetero.report.plan import load_plan
from tests.support.integration.harness import Start

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.mark.timeout(800)
def test_example_of_the_planning_page_leads_from_a_profile_to_a_comparison(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text(encoding="utf-8").partition("## An example of five minutes\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (script,) = [block for language, block in blocks if language == "python"]
    commands = "".join(block for language, block in blocks if language != "python").replace("\\\n", " ")
    Path("fit.py").write_text(script.replace("range(3)", "range(1)"))  # one epoch is enough, and takes less time
    outputs = []
    for line in commands.splitlines():
        words, _, file = line.partition(" > ")
        job = start([sys.executable, "-m", "hetero.cli", *shlex.split(words)[1:]], tmp_path, {})
        assert job.wait(300.0) == 0, job.output
        outputs.append(job.output)
        if file:
            Path(file).write_text(job.output)
    assert len(outputs) == 4
    assert outputs[1].startswith("Add 1 x ml.c5.9xlarge as data hosts: a step takes ")
    stated_ms = re.search(r"a step takes (\d+) ms", section)
    assert stated_ms is not None
    step_ms = 1000 * load_plan("plan.json").chosen.step_time.value
    # Other work of the machine makes the emulated steps longer, never shorter.
    assert step_ms > 0.95 * float(stated_ms[1])
    assert ET.parse("plan.html").getroot().find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert "The plan expected a step time of " in Path("runs/planned/report.md").read_text(encoding="utf-8")
