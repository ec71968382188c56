"""docs/canary.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero.decide.canary.comparison import CERTAIN
from hetero.decide.canary.design import MAX_RUNS
from hetero.decide.canary.model import RULES
from hetero.decide.canary.points import MAX_FRACTION, MIN_FRACTIONS, MIN_RUNS
from hetero.decide.canary.suggestions import BUDGET_S
from hetero.errors import ExitCode
from hetero.loaders.parts import FRACTION_VARIABLE, PART_SEED_VARIABLE
from hetero.metrics.excess import MAX_EXCESS

WORDS = {3: "three", 4: "four", 10: "ten"}
PAGE = " ".join((Path(__file__).parents[3] / "docs" / "canary.md").read_text(encoding="utf-8").split())


def test_table_of_rules_has_every_rule_and_no_other() -> None:
    table = PAGE.partition("| rule | the runs show |")[2].partition("**Scripts that need")[0]
    assert set(re.findall(r"\| `([a-z-]+)` \|", table)) == set(RULES)


@pytest.mark.parametrize(
    "text",
    [
        f"wider than {100 * MAX_EXCESS:.0f} % of the value to each side",
        f"Below {100 * CERTAIN:.0f} % the answer is",
        f"`{FRACTION_VARIABLE}` and `{PART_SEED_VARIABLE}`",
        f"each has at least {WORDS[MIN_RUNS]}.",
        f"fewer than {WORDS[MIN_RUNS]} runs finished, or they had fewer than {WORDS[MIN_FRACTIONS]} different",
        f"At least {WORDS[MIN_FRACTIONS]} fractions",
        f"{WORDS[BUDGET_S / 60]} more minutes of canaries suffice",
        f"each at most {100 * MAX_FRACTION:.0f} %",
        f"at most {MAX_RUNS} runs",
        f"| {int(ExitCode.BUDGET)} | `--budget-hours` ended the study",
    ],
)
def test_figure_of_the_page_is_that_of_the_code(text: str) -> None:
    assert text in PAGE
