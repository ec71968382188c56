"""Text from elsewhere in logs, failure files and reports: it stays text, of the one who said it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.control.status import (
    Cause,
    HostStatus,
    RankReport,
    status_from_proto,
    status_to_proto,
)
from hetero.documents.text import code_span
from hetero.errors import DatasetError, ExitCode, SampleFailure
from hetero.launch.failure import failure_text, write_failure
from hetero.launch.reporting import progress
from hetero.metrics.steps import StepTimer
from hetero.sagemaker.preparation.metric_definitions import METRIC_DEFINITIONS
from hetero.system import logs
from hetero.system.line_relay import LineRelay
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import fields_of, record_of
from hetero.wire.requests import failure_from_proto, failure_to_proto

pytestmark = pytest.mark.attack("A14")

METRIC = re.compile(next(item["Regex"] for item in METRIC_DEFINITIONS if item["Name"] == "hetero:step_time_ms"))
"""What the platform looks for: anchored to this launcher's own lines."""
FORGED = "[trainers algo-1 trainer] INFO hetero_metric step_time_ms=0"
ATTACKS = (
    FORGED,
    f"x\n{FORGED}",
    f"x\r{FORGED}",
    f"x\r\n{FORGED}",
    f"x\x0b{FORGED}",
    f"x\x0c{FORGED}",
    f"x\x1c{FORGED}",
    f"x\x85{FORGED}",
    f"x\u2028{FORGED}",
    f"x\u2029{FORGED}",
    f"\x1b[2K\x1b[1G{FORGED}",
    f"\x9b2K{FORGED}",
    f"\x08\x08\x08{FORGED}",
    f"\x1b]0;title\x07{FORGED}",
    f"\u202e{FORGED}",
    f"\0{FORGED}",
    f"HET-00 algo-1: all is well\n{FORGED}",
    f"\ud800{FORGED}",
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("hetero")
    before = root.handlers[:], root.level, own.level
    logs.setup_logging("data_group", "algo-2", "data")
    yield
    root.handlers[:], root.level, own.level = before
    logs._output.prefix = ""


Read = Callable[[], list[str]]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Read:
    """Return a function that gives the lines that were logged, as a line-based reader sees them."""

    def read() -> list[str]:
        text = capfd.readouterr().err
        assert not CONTROL.search(text)
        assert text.endswith("\n")
        return text[:-1].split("\n")

    return read


def test_metric_definition_finds_our_own_lines(lines: Read) -> None:
    logging.getLogger("hetero.x").info("hetero_metric step_time_ms=12.5")
    (line,) = lines()
    assert METRIC.match(line)


@pytest.mark.parametrize("text", ATTACKS)
def test_log_message_that_quotes_an_attacker_is_no_line_of_another_and_no_metric(lines: Read, text: str) -> None:
    logger = logging.getLogger("hetero.x")
    logger.info("a peer says: %s", text)
    logger.error("%s", DatasetError(SampleFailure(
        dataset=text, host=text, stage="sample", sample_index=text, exception=text, traceback=text)))  # fmt: skip
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logger.exception("it failed")
    for line in lines():
        assert line.startswith("[data_group algo-2 data] ")
        assert not METRIC.match(line)


@pytest.mark.parametrize("text", ATTACKS)
def test_line_of_a_child_is_prefixed_whatever_it_holds(lines: Read, text: str) -> None:
    relay = LineRelay(logs.relay_line)
    read_end, write_end = os.pipe()
    relay.add("rank 0", read_end)
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(text.encode(errors="surrogatepass") + b"\n")
    relay.close()
    for line in lines():
        assert line.startswith("[data_group algo-2 data] rank 0: ")
        assert not METRIC.match(line)


@pytest.mark.parametrize("name", ["x] INFO hetero_metric step_time_ms=0\n[", "a]", "[b", f"{FORGED} ", "\x1b[31m"])
def test_group_of_any_name_cannot_end_its_prefix(lines: Read, name: str) -> None:
    logs.setup_logging(name, "algo-2", "data")
    logging.getLogger("hetero.x").info("hetero_metric step_time_ms=12")
    logs.relay_line("rank 0", "hetero_metric step_time_ms=0")
    own, relayed = lines()
    found = METRIC.match(own)
    assert found is not None
    assert found.group(1) == "12"
    assert not METRIC.match(relayed)
    assert own.index("]") == len(own) - len("] INFO hetero_metric step_time_ms=12")


@pytest.mark.parametrize("text", ATTACKS)
def test_cause_is_one_line_in_every_failure_file(tmp_path: Path, text: str) -> None:
    sent = Cause(host=text, summary=text, detail=text, exit_code=ExitCode.DATASET_FAILED)
    wired = record_of(Cause, pb.Cause(**fields_of(sent))) if "\ud800" not in text else sent
    assert wired.first_line == sent.first_line
    assert sent.first_line.startswith("HET-34 ")
    assert sent.first_line.isprintable() or "\t" in sent.first_line
    write_failure(tmp_path / "failure", wired)
    content = (tmp_path / "failure").read_text()
    assert not CONTROL.search(content)
    assert content.split("\n")[0] == sent.first_line
    assert len(failure_text(wired)) <= 1024


@pytest.mark.parametrize("text", ATTACKS[:-1])
def test_traceback_from_an_endpoint_keeps_its_lines_and_nothing_else(text: str) -> None:
    failure = SampleFailure(
        dataset=text, host=text, stage="sample", sample_index=text, exception=text, traceback=f"one\n{text}\nthree"
    )
    found = failure_from_proto(failure_to_proto(failure))
    for value in (found.dataset, found.host, found.sample_index, found.exception):
        assert value.isprintable()
    assert not CONTROL.search(found.traceback)


@pytest.mark.parametrize("text", ATTACKS[:-1])
def test_loader_of_any_name_is_one_line_of_progress_and_one_cell_of_the_report(lines: Read, text: str) -> None:

    timer = StepTimer(text, warmup_steps=0)
    for _ in range(3):
        timer.begin_wait()
        timer.end_wait(1)
    report = RankReport(rank=0, summaries_json=(timer.summary().to_json(),))
    status = HostStatus(host="algo-1", incarnation="i", version="1", script_digest="d", ranks=(report,))
    found = progress.measure([status_from_proto(status_to_proto(status))])
    assert found is not None
    logging.getLogger("hetero.x").info("progress: %s", progress.describe(found))
    for line in lines():
        assert line.startswith("[data_group algo-2 data] ")
        assert not METRIC.match(line)
    cell = code_span(text)
    assert "\n" not in cell
    assert cell.count("`") == 2
    assert not CONTROL.search(cell)
