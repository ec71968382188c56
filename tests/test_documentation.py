"""What the README and the pages beside it say is what the program does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hetero import cli, config
from hetero.cluster import Role, find_platform
from hetero.decide import profile
from hetero.decide.planning import enumeration, ranking, reasons
from hetero.decide.planning.steps import endpoints, model, uncertain
from hetero.errors import ConfigError, ExitCode
from hetero.loaders.measuring import phases
from hetero.reader.window_size import MAX_WINDOW_BYTES, PREFETCH_FACTOR

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "benchmarks" / "README.md"),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*/README.md")),
    ROOT / "tests" / "cases" / "README.md",
]


def commands() -> list[str]:
    """Return the ``hetero`` commands in the pages' shell blocks, continued lines joined."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("hetero ")]


def titles(page: Path) -> set[str]:
    """Return what may stand behind the # of a link to the page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_exit_code_is_listed_with_its_help_text() -> None:
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    assert [code for code in ExitCode if f"| {int(code)} | {code.help_text} |" not in page] == []


def test_every_reason_of_a_plan_is_explained() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert [reason for reason in reasons.REASONS if f"| `{reason}` | " not in page] == []


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The plan tries 0 to {} hosts of each type", (enumeration.MAX_HOSTS,)),
        ("only if that saves at least {} % of the cost", (100 * ranking.WORTH_SPENDING,)),
        ("deviation of their speed is {} % within a measured family", (100 * uncertain.SPEED_SPREAD,)),
        ("within a measured family, and {} % in other families", (100 * uncertain._OTHER_FAMILY_SPREAD,)),
        (
            "the plan assumes {} to {} MB/s per vCPU",
            tuple(each / 1e6 for each in uncertain._UNKNOWN_NETWORK_BYTES_PER_S_PER_VCPU),
        ),
        ("Endpoints may use {} % of a host's memory", (100 * endpoints.MEMORY_SHARE,)),
        (
            "at most {} GiB per rank, and {} per endpoint",
            (MAX_WINDOW_BYTES / 2**30, PREFETCH_FACTOR),
        ),
        ("takes at least {} steps, {} s, and three times the batches", (phases.ENOUGH_STEPS, phases.ENOUGH_S)),
        ("The job waits for data in less than {} % of a step", (100 * model.NEARLY_BUSY,)),
        ("or waited in less than {} % of each step is rejected", (100 * profile.NEARLY_BUSY,)),
    ],
)
def test_figure_in_the_page_about_plans_is_that_of_the_code(sentence: str, expected: tuple[float, ...]) -> None:
    text = " ".join((ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split())
    found = re.findall(re.escape(sentence).replace(r"\{\}", r"([\d.]+)"), text)
    assert len(found) == 1, f"docs/planning.md has {sentence!r} {len(found)} times, expected once: adapt this test"
    figures = tuple(float(each) for each in ([found[0]] if isinstance(found[0], str) else found[0]))
    message = f"docs/planning.md: {sentence!r} has {figures}, the code has {expected}: correct the page"
    assert figures == pytest.approx(expected), message


def test_every_command_is_understood() -> None:
    found, parser, wrong = commands(), cli._make_parser(), []
    assert len(found) > 50
    for command in found:
        _, *arguments = shlex.split(command, comments=True)
        try:
            config.parse(parser, config.split_at_script(parser, arguments)[0])
        except (ConfigError, SystemExit) as error:  # argparse has printed its reason
            wrong.append(f"{command}: {error}")
    assert wrong == [], "\n".join(wrong)


def test_readme_is_short() -> None:
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 900, "move details to docs/"


def test_readme_cluster_file_is_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "cluster.json"
    path.write_text(block)
    cluster = find_platform({}, cluster_file=str(path)).read_cluster(host="node-7")
    assert cluster.role is Role.TRAINER
    assert [host.name for host in cluster.data_hosts] == ["node-1", "node-2"]


def test_links_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for path, title in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            target = page.parent / path if path else page
            if not target.exists() or (title and title not in titles(target)):
                dead.append(f"{page.relative_to(ROOT)}: {path}#{title}")
    assert dead == [], "\n".join(dead)


def test_tests_that_the_log_of_public_reports_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "tests" / "cases" / "README.md").read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    assert (
        named - {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)} == set()
    )
