"""What a canary run observes of its script: imports, periodic conditions, loops left early."""

from __future__ import annotations

import ast
import builtins
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.launch.ranks.instrumented import instrumented
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE, ScriptObserver, observer_of

SCRIPT = """
import json
import pathlib

def train(steps):
    bad = 0
    for step in range(steps):
        if step % 500 == 0 and step:
            raise AssertionError("not reached")
        if not step % 4:
            bad += 1
        if bad >= 3:
            break
    while True:
        if bad >= 3:
            break
    for other in range(3):
        if other == 1:
            break
    name = "%s-%d" % ("a", 3)
    if "x%d" % 3 == "x3":
        return name

if __name__ == "__main__":
    result = train(40)
"""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    original = builtins.__import__
    yield
    assert builtins.__import__ is original
    assert not hasattr(builtins, "__hetero_observe__")


def observe(tmp_path: Path, text: str) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(text)
    with ScriptObserver(tmp_path, 0).running(str(script), is_module=False):
        runpy.run_path(str(script), run_name="__main__")
    found: dict[str, Any] = json.loads((tmp_path / "rank-0.json").read_text())
    return found


def test_periods_and_ends_of_loops_are_counted(tmp_path: Path) -> None:
    found = observe(tmp_path, SCRIPT)
    assert found["periodic"] == [
        {"line": 8, "text": "if step % 500 == 0 and step", "period": 500, "largest": 8},
        {"line": 10, "text": "if not step % 4", "period": 4, "largest": 8},
        {"line": 12, "text": "if bad >= 3", "period": 3, "largest": 3},
    ]
    assert found["left_loops"] == [{"line": 12, "text": "if bad >= 3", "count": 1}]


@pytest.mark.parametrize(
    ("condition", "bound", "largest"),
    [
        ("step >= limit", 500, 19),
        ("limit <= step", 500, 19),
        ("step > 2.5 * limit", 1250, 19),
        ("step == limit", 500, 19),
    ],
)
def test_limit_that_is_not_reached_is_recorded(condition: str, bound: int, largest: int, tmp_path: Path) -> None:
    text = f"limit = 500\nfor step in range(20):\n    train = abs(step)\n    if {condition}:\n        break\n"
    found = observe(tmp_path, text)
    assert [(each["period"], each["largest"]) for each in found["periodic"]] == [(bound, largest)]
    assert found["left_loops"] == []


@pytest.mark.parametrize(
    "condition", ["math.nan > step", "step >= math.inf", "'a' > 'b'", "step >= limit and step > 0", "0 < step > 99"]
)
def test_comparison_that_is_no_limit_is_not_recorded(condition: str, tmp_path: Path) -> None:
    loop = f"for step in range(20):\n    train = abs(step)\n    if {condition}:\n        break\n"
    text = f"import math\nlimit = 500\n{loop}"
    assert observe(tmp_path, text)["periodic"] == []


@pytest.mark.parametrize("end", ["sys.exit(0)", "exit()", "quit()", "raise Stop", "raise Stop from None"])
def test_end_of_the_script_by_a_value_is_recorded(end: str, tmp_path: Path) -> None:
    text = (
        "import sys\nclass Stop(SystemExit): pass\nbad = 0\n"
        f"for epoch in range(50):\n    abs(epoch)\n    bad += 1\n    if bad >= 3:\n        {end}\n"
    )
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(SystemExit), ScriptObserver(tmp_path, 0).running(str(script), is_module=False):
        runpy.run_path(str(script), run_name="__main__")
    found = json.loads((tmp_path / "rank-0.json").read_text())
    assert [each["text"] for each in found["left_loops"]] == ["if bad >= 3"]


def test_error_that_the_loop_catches_is_no_end_of_it(tmp_path: Path) -> None:
    text = (
        "for step in range(9):\n    abs(step)\n    try:\n        if step > 4:\n            raise ValueError\n"
        "    except ValueError:\n        pass\n"
    )
    assert observe(tmp_path, text)["left_loops"] == []


@pytest.mark.parametrize(
    "body",
    [
        "x = f() if step % 500 == 0 else 0",
        "save = step % 500 == 0",
        "save = step and step % 500 == 0",
        "if step == 500: f()",
        "if step >= 500: f()",
        "if count > 500: f()",
    ],
)
@pytest.mark.parametrize("kind", ["int", "np.int64", "torch.tensor"])
def test_milestone_in_another_form_is_recorded(body: str, kind: str, tmp_path: Path) -> None:
    if kind == "torch.tensor":
        pytest.importorskip("torch")
    start = {"int": "", "np.int64": "import numpy as np\n", "torch.tensor": "import torch\n"}[kind]
    text = (
        f"{start}def f(): return 1\ncount = {kind}(0)\n"
        f"for number in range(1, 20):\n    step = {kind}(number)\n    f()\n    count += 1\n    {body}\n"
    )
    if "step" in body and "%" not in body:
        text = text.replace("for number in", "for step in").replace(f"    step = {kind}(number)\n", "")
    found = observe(tmp_path, text)
    assert [(each["period"], each["largest"]) for each in found["periodic"]] == [(500, 19)]


LOOKUP = """
SCHEDULE = ((30, 0.1), (60, 0.01))

def rate_of(step):
    for boundary, rate in SCHEDULE:
        if step < boundary:
            return rate
    return 0.001

print(rate_of(5))
"""


def test_lookup_is_no_early_end(tmp_path: Path) -> None:
    found = observe(tmp_path, LOOKUP)
    assert (found["left_loops"], found["periodic"]) == ([], [])


def test_script_that_runs_another_script_runs_that_one(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("RESULT = 3\n")
    observe(tmp_path, f"import runpy\nassert runpy.run_path({str(other)!r})['RESULT'] == 3\n")


def test_script_does_the_same_as_without_the_observer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = runpy.run_path(str(script), run_name="__main__")["result"]
    with ScriptObserver(tmp_path, 0).running(str(script), is_module=False):
        assert runpy.run_path(str(script), run_name="__main__")["result"] == plain == "a-3"


def test_times_are_those_of_imports_and_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.2)\n")
    found = observe(tmp_path, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_module\n")
    assert 0.2 <= found["import_s"] <= found["ended_monotonic_s"] - found["began_monotonic_s"]


def test_file_is_written_if_the_script_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no')\n")
    with (
        pytest.raises(ValueError, match="no") as caught,
        ScriptObserver(tmp_path, 3).running(str(script), is_module=False),
    ):
        runpy.run_path(str(script), run_name="__main__")
    assert caught.traceback[-1].path == script
    assert (tmp_path / "rank-3.json").is_file()


def test_script_that_is_not_python_fails_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        observe(tmp_path, "def\n")


def test_lines_keep_their_numbers() -> None:
    before, after = ast.parse(SCRIPT), instrumented(SCRIPT)
    lines = {node.lineno for node in ast.walk(before) if isinstance(node, ast.stmt)}
    assert {node.lineno for node in ast.walk(after) if isinstance(node, ast.stmt)} == lines


def test_observer_exists_in_canary_runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CANARY_DIR_VARIABLE, raising=False)
    assert observer_of(0) is None
    monkeypatch.setenv(CANARY_DIR_VARIABLE, str(tmp_path))
    assert observer_of(0) is not None


PICKLED = """
import cloudpickle, pathlib

def periods(n):
    for i in range(n):
        if i % 2 == 0:
            abs(i)
        if i >= 5:
            break
    return i

pathlib.Path({path!r}).write_bytes(cloudpickle.dumps(periods))
result = periods(9)
"""


def test_function_that_is_pickled_by_value_works_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    path = tmp_path / "function.pickle"
    found = observe(tmp_path, PICKLED.format(path=str(path)))
    assert found["left_loops"][0]["count"] == 1
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(9), 'hetero' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "5 False\n"


def test_hot_loop_calls_the_observer_for_few_of_its_evaluations(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for i in range(3_000_000):\n    if i % 1_000_000_000 == 0:\n        pass\n")
    observer = ScriptObserver(tmp_path, 0)
    began_s = time.monotonic()
    with observer.running(str(script), is_module=False):
        runpy.run_path(str(script), run_name="__main__")
    passed_s = time.monotonic() - began_s
    (recorder,) = observer._bounded
    assert 10_000 <= recorder.count <= 10_001 + passed_s / 0.02
    (found,) = json.loads((tmp_path / "rank-0.json").read_text())["periodic"]
    assert found["largest"] > 10_000  # samples follow


EPOCHS = """
class Stopper:
    def __init__(self, at): self.at, self.bad = at, 0
    def step(self, loss): self.bad += 1; return self.bad >= self.at
    @property
    def should_stop(self): return self.bad >= self.at

def train(losses, patience=2):
    stopper, best, bad, total = Stopper(2), 9.0, 0, 0
    for epoch, loss in enumerate(losses):
        stopper.step(loss)
        stop = loss > best
        best, bad = min(best, loss), bad
        if loss >= best:
            bad += 1
        total += 1
        if CONDITION:
            break
    return epoch

result = train([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
"""


@pytest.mark.parametrize(
    "condition",
    ["bad == patience", "not bad != patience", "stopper.should_stop", "stopper.step(loss)", "stop", "total and stop"],
)
def test_stop_that_depends_on_values_is_recorded(condition: str, tmp_path: Path) -> None:
    found = observe(tmp_path, EPOCHS.replace("CONDITION", condition))
    assert [each["text"] for each in found["left_loops"]] == [f"if {condition}"]


@pytest.mark.parametrize("condition", ["epoch == 3", "total == 2", "total == patience", "epoch in (1, 2)", "patience"])
def test_stop_at_a_fixed_place_is_not_recorded(condition: str, tmp_path: Path) -> None:
    assert observe(tmp_path, EPOCHS.replace("CONDITION", condition))["left_loops"] == []


def test_steps_of_gradient_accumulation_end_at_a_fixed_place(tmp_path: Path) -> None:
    text = "done = 0\nfor i in range(99):\n    if i % 4 == 3:\n        done += 1\n    if done == 5:\n        break\n"
    assert observe(tmp_path, text)["left_loops"] == []


def test_search_is_no_early_stop(tmp_path: Path) -> None:
    text = "for word in ['a', 'b', 'c']:\n    if word.startswith('b'):\n        break\n"
    assert observe(tmp_path, text)["left_loops"] == []


@pytest.mark.parametrize(
    ("test", "is_recorded"),
    [
        ("old - loss > 0.01", True),
        ("loss > 0.25", True),
        ("count < 3", False),
        ("rate > 0.25", False),
        ("loss > 0.25 and count < 9", False),
    ],
)
def test_while_loop_that_ends_by_a_value_is_recorded(test: str, is_recorded: bool, tmp_path: Path) -> None:
    text = (
        "count, old, loss, rate = 0, 9.0, 4.0, 1.0\n"
        f"while {test}:\n    old, loss = loss, float(loss / 2)\n    count += 1\n    rate *= 0.5\n"
    )
    found = observe(tmp_path, text)["left_loops"]
    assert [each["text"] for each in found] == [f"while {test}"] * is_recorded


def test_compiled_and_traced_functions_stay_as_they_are() -> None:
    loop = "    for i in range(9):\n        if i % 4 == 0:\n            pass\n"
    for head in ("@njit\ndef f():\n", "@torch.compile(fullgraph=True)\ndef f():\n", "def forward():\n"):
        assert ast.unparse(instrumented(head + loop)) == ast.unparse(ast.parse(head + loop))
    assert "__hetero" in ast.unparse(instrumented("@hydra.main()\ndef f():\n" + loop))


def test_docstring_and_future_imports_stay_first(tmp_path: Path) -> None:
    text = (
        '"""What it does."""\nfrom __future__ import annotations\nif 5 + 2 % 2:\n    pass\nx = 7\nif x % 2:\n    pass\n'
    )
    assert observe(tmp_path, text)["periodic"][0]["largest"] == 7
    assert ast.get_docstring(instrumented(text)) == "What it does."
