"""docs/canary.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.canary.comparison import CERTAIN
from hetero.canary.conducting import _NUM_FIRST
from hetero.canary.model import RULES
from hetero.canary.refusals import MAX_HALF_WIDTH
from hetero.canary.suggestions import BUDGET_S
from hetero.loaders.parts import FRACTION_VARIABLE, PART_SEED_VARIABLE

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "canary.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_explained(rule: str) -> None:
    assert f"| `{rule}` |" in PAGE


@pytest.mark.parametrize(
    "text",
    [
        f"wider than {100 * MAX_HALF_WIDTH:.0f} % of the value to each side",
        f"Below {100 * CERTAIN:.0f} % it says",
        f"`{FRACTION_VARIABLE}` and `{PART_SEED_VARIABLE}`",
        "after four runs" if _NUM_FIRST == 4 else "?",
        "ten more minutes" if BUDGET_S == 600 else "?",
    ],
)
def test_figure_of_the_page_is_that_of_the_code(text: str) -> None:
    assert text in PAGE
