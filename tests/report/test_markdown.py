"""Markdown: what a reader sees, and that no text from elsewhere can be markup."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from hetero.documents.text import code_span
from hetero.metrics.hosts import HostUsage
from hetero.metrics.skips import SkippedSample
from hetero.metrics.steps import StepSummary
from hetero.pricing import Catalogue
from hetero.report import GroupFacts, RankFacts, RunFacts, build_report, compare, render_comparison, render_report
from hetero.report.markdown import PricePerformance, price_performance_table

FactsMaker = Callable[..., RunFacts]
PRICED = Catalogue.load("seed-2022")


def test_report_shows_verdict_steps_cost_and_labels(make_facts: FactsMaker) -> None:
    text = render_report(build_report(make_facts(events={"failovers": 2, "hedges": 3, "endpoint restarts": 0}), PRICED))
    assert text.startswith("# Run `r-1`\n\nThe slowest rank computes only 40 % of the time")
    assert "`train.py --epochs 2`" in text
    assert re.search(r"step time +\| +1193 ms \| +1193 ms \| +1790 ms \| simulated", text)
    assert "- Per 1,000 steps: 1.268 USD (simulated)" in text
    assert "List prices (`us-east-1`, `2022`, " in text
    assert "12 more vCPUs beside the 8" in text
    assert re.search(r"vCPUs that would suffice +\| 20 \(modelled\)", text)
    assert "- failovers: 2\n- hedges: 3" in text
    assert "endpoint restarts" not in text
    assert "- Hosts share one machine." in text
    assert "## Ranks" not in text  # one rank, one loader: the headline says it all


def test_report_of_failed_run_without_prices_or_batches_is_readable(make_facts: FactsMaker) -> None:
    text = render_report(build_report(make_facts(exit_code=30, ranks=(), hosts=()), Catalogue.load()))
    assert "30 The training script failed." in text
    assert "No loader delivered a batch." in text
    assert "- no price for ml.p3.2xlarge; pass --price ml.p3.2xlarge=USD" in text
    assert "None" not in text


def test_report_of_a_loader_without_measured_steps_leaves_it_out(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary]
) -> None:
    loaders = (summary_of(1.0), summary_of(None, name="validation"))
    ranks = tuple(RankFacts(rank=i, host="algo-1", loaders=loaders) for i in range(2))
    text = render_report(build_report(make_facts(ranks=ranks), PRICED))
    assert "## Ranks" in text
    assert "validation" not in text


def test_report_numbers_loaders_of_one_name(make_facts: FactsMaker, summary_of: Callable[..., StepSummary]) -> None:
    ranks = (RankFacts(rank=0, host="h", loaders=(summary_of(0.1), summary_of(0.5))),)
    report = build_report(make_facts(ranks=ranks), PRICED)
    text = render_report(report)
    assert "| `photos/train` " in text
    assert "| `photos/train (2)` |" in text
    assert "Loader `photos/train (2)`, 1 rank" in text
    assert "Pass `name=` to a loader to name it" in text
    alone = make_facts(ranks=(RankFacts(rank=0, host="h", loaders=(summary_of(0.1), summary_of(0.1, name="val"))),))
    assert "`name=`" not in render_report(build_report(alone, PRICED))


def test_report_of_many_ranks_and_hosts_stays_bounded(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary], usage_of: Callable[..., HostUsage]
) -> None:
    ranks = tuple(RankFacts(rank=i, host=f"algo-{i}", loaders=(summary_of(1.0),)) for i in range(136))
    hosts = tuple(usage_of(f"algo-{i}") for i in range(136))
    text = render_report(build_report(make_facts(ranks=ranks, hosts=hosts), PRICED))
    assert "## Ranks" in text
    assert text.count("36 more are in the JSON.") == 2


EVIL = "x`|\n# <script>alert(1)</script> [a](javascript:b) ![i](http://e) **b** \x1b[31m\u202e_c_"


@pytest.mark.attack("A14")
@pytest.mark.attack("A22")
def test_text_from_elsewhere_cannot_be_markup(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary], usage_of: Callable[..., HostUsage]
) -> None:
    summary = summary_of(1.0, name=EVIL)
    facts = make_facts(
        run_id=EVIL,
        command=EVIL,
        started_at=EVIL,
        groups=(GroupFacts(name=EVIL, role="trainer", instance_type=EVIL, count=1),),
        ranks=tuple(RankFacts(rank=i, host=EVIL, loaders=(summary,)) for i in range(2)),
        hosts=(usage_of(EVIL),),
        events={EVIL: 1},
        simulated=(EVIL,),
        versions={EVIL: EVIL},
        options={"emulate" + EVIL: EVIL},
    )
    report = build_report(facts, PRICED)
    plain = build_report(make_facts(), PRICED)
    for text in (render_report(report), render_comparison(compare(plain, report))):
        outside = re.sub(r"`[^`\n]*`", "", text)
        assert "`" not in outside
        for danger in ("<", "[", "]", "_c_", "http", "\x1b", "\u202e"):
            assert danger not in outside, danger
        assert "\x1b" not in text
        assert "\u202e" not in text
        for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
            assert len({line.count("|") for line in table.splitlines()}) == 1
        assert {line for line in text.splitlines() if line.startswith("# ")} <= {
            "# Price and performance",
            f"# Run {code_span(EVIL)}",
        }


def test_price_performance_table_prints_the_published_rows_in_the_right_unit() -> None:
    rows = [
        PricePerformance(name="homogeneous", hosts="a", hourly_usd=37.688, step_time_s=0.192, per_1k_steps_usd=2.010,
                         basis="published"),
        PricePerformance(name="heterogeneous", hosts="b", hourly_usd=45.032, step_time_s=0.086,
                         per_1k_steps_usd=1.0758, speedup="2.23x", saving="46.5 %", basis="published"),
    ]  # fmt: skip
    lines = price_performance_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[0].split("|")[1:-2]] == [
        "run",
        "hosts",
        "USD/h",
        "step",
        "USD/1,000 steps",
        "speed-up",
        "saving",
    ]
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert cells == ["heterogeneous", "b", "45.032", "86.0 ms", "1.076", "2.23x", "46.5 %", "published"]


def skips_of(num: int, **changes: str) -> tuple[SkippedSample, ...]:
    values = {"index": "17", "host": "algo-1/0", "exception": "ValueError: bad", **changes}
    return tuple(SkippedSample(epoch=number, **values) for number in range(num))


def test_report_lists_skipped_samples_and_counts_the_rest(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary]
) -> None:
    loaders = [
        (summary_of(1.0, num_skips=2, skips=skips_of(2)),),
        (summary_of(1.0, num_skips=150, skips=skips_of(100)),),
        (summary_of(1.0),),
    ]
    ranks = tuple(RankFacts(rank=rank, host="algo-1", loaders=its) for rank, its in enumerate(loaders))
    text = render_report(build_report(make_facts(ranks=ranks), PRICED))
    section = text[text.index("## Skipped samples") : text.index("## Cost")]
    assert "152 times a sample raised, and another sample of its batch replaced it." in section
    assert re.search(r"\| +0 \| `photos/train` \| `17` +\| +1 \| `algo-1/0` \| `ValueError: bad` \|", section)
    assert section.count("`ValueError: bad`") == 100
    assert "2 more are in the JSON." in section
    assert "50 were only counted." in section


def test_report_says_once_of_a_single_skipped_sample(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary]
) -> None:
    ranks = (RankFacts(rank=0, host="algo-1", loaders=(summary_of(1.0, num_skips=1, skips=skips_of(1)),)),)
    text = render_report(build_report(make_facts(ranks=ranks), PRICED))
    assert "\nOnce a sample raised, and another sample of its batch replaced it.\n" in text


def test_report_without_skipped_samples_says_nothing_of_them(make_facts: FactsMaker) -> None:
    assert "kipped" not in render_report(build_report(make_facts(), PRICED))


def test_report_says_what_compression_saved_each_loader(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary]
) -> None:
    of_rank = (
        summary_of(1.0, compression="lz4", batch_bytes=4_000_000_000, saved_bytes=1_000_000_000),
        summary_of(1.0, name=EVIL, compression=EVIL, batch_bytes=5_000_000, saved_bytes=6_000_000),
        summary_of(1.0, name="plain", batch_bytes=7_000_000),
        summary_of(1.0, name="small", compression="lz4", batch_bytes=84_876, saved_bytes=60_064),
        summary_of(1.0, name="local", compression="zstd"),
    )
    ranks = tuple(RankFacts(rank=rank, host="algo-1", loaders=of_rank) for rank in range(2))
    text = render_report(build_report(make_facts(ranks=ranks), PRICED))
    section = text[text.index("## Compression") : text.index("## Cost")].strip()
    assert section.splitlines() == [
        "## Compression",
        "",
        "- Loader `photos/train`: 8,000 MB of batches came as 6,000 MB with `lz4`",
        f"- Loader {code_span(EVIL)}: 10 MB of batches came as 0 kB with {code_span(EVIL)}",
        "- Loader `small`: 170 kB of batches came as 50 kB with `lz4`",
    ]
    assert "## Compression" not in render_report(build_report(make_facts(), PRICED))


def test_skipped_samples_cannot_be_markup(make_facts: FactsMaker, summary_of: Callable[..., StepSummary]) -> None:
    evil = skips_of(1, index=EVIL, host=EVIL, exception=EVIL)
    ranks = (RankFacts(rank=0, host="algo-1", loaders=(summary_of(1.0, num_skips=1, skips=evil),)),)
    text = render_report(build_report(make_facts(ranks=ranks), PRICED))
    outside = re.sub(r"`[^`\n]*`", "", text)
    for danger in ("`", "<", "[", "http", "\x1b", "\u202e"):
        assert danger not in outside, danger
