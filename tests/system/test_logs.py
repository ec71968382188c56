from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hetero.system import logs


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("hetero")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], root.level, own.level = before
    logs._output.prefix = ""


def test_line_has_group_host_role_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("dnn_group", "algo-2", "trainer")
    logging.getLogger("hetero.launch").info("ready in %.1f s", 1.5)
    assert capsys.readouterr().err == "[dnn_group algo-2 trainer] INFO ready in 1.5 s\n"


def test_empty_parts_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("simulate", "", "")
    logs.relay_line("rank 0", "loss 0.1")
    assert capsys.readouterr().err == "[simulate] rank 0: loss 0.1\n"


def test_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("a", "b", "c")
    logs.setup_logging("d", "e", "f", "warning")
    logging.getLogger("hetero").info("hidden")
    logging.getLogger("hetero").warning("shown")
    assert capsys.readouterr().err == "[d e f] WARNING shown\n"


def test_libraries_are_quiet_below_warning(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("a", "b", "c", "info")
    logging.getLogger("urllib3").info("hidden")
    logging.getLogger("urllib3").warning("shown")
    assert capsys.readouterr().err == "[a b c] WARNING shown\n"


@pytest.mark.attack("A14")
def test_forged_line_in_a_message_keeps_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("a", "b", "c")
    logging.getLogger("hetero").error("failed: %s", "x\n[a algo-9 trainer] INFO hetero_metric step_time_ms=0\x1b[2K")
    assert capsys.readouterr().err.splitlines() == [
        "[a b c] ERROR failed: x",
        r"[a b c] ERROR | [a algo-9 trainer] INFO hetero_metric step_time_ms=0\x1b[2K",
    ]


@pytest.mark.attack("A14")
def test_traceback_is_prefixed_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("a", "b", "c")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("hetero").exception("it failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[a b c] ERROR it failed"
    assert lines[-1] == "[a b c] ERROR | RuntimeError: boom"
    assert all(line.startswith("[a b c] ERROR") for line in lines)


@pytest.mark.fault("F37")
def test_closed_output_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: str) -> None:
            raise BrokenPipeError

    logs.setup_logging("a", "b", "c")
    monkeypatch.setattr(sys, "stderr", Closed())
    logging.getLogger("hetero").error("lost")
    logs.relay_line("rank 0", "lost")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for descriptor in (read_end, write_end):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def num_said(received: bytes) -> int:
    """Return the number of dropped lines in the log."""
    return sum(int(found) for found in re.findall(rb"WARNING (\d+) lines were dropped here", received))


@pytest.mark.fault("F37")
def test_writer_with_a_stopped_reader_never_waits_and_says_what_it_dropped(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    writer = logs.LineWriter(write_end, max_bytes=10_000)
    line = "x" * 99
    for _ in range(2_000):  # twice what the pipe and the queue hold
        writer.put(line)
    dropped = writer.num_dropped
    assert dropped > 0
    received = b""
    while num_said(received) < dropped:  # the reader goes on
        received += os.read(read_end, 65536)
    writer.put("after")
    writer.close()
    os.close(write_end)
    while chunk := os.read(read_end, 65536):
        received += chunk
    lines = received.decode().splitlines()
    assert lines.count(line) == 2_000 - dropped
    assert num_said(received) == dropped
    assert lines[-1] == "after"


@pytest.mark.fault("F27")
def test_writer_to_a_full_disk_goes_on_when_there_is_room_and_says_what_it_dropped(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    read_end, write_end = pipe
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = logs.LineWriter(descriptor, max_bytes=10_000)
    for number in range(2_000):  # twenty times what the queue holds
        writer.put(f"{number:>99}")
    dropped = writer.num_dropped
    assert 1_000 < dropped < 2_000
    os.dup2(write_end, descriptor)  # now there is room
    received = b""
    while num_said(received) < dropped:
        received += os.read(read_end, 65536)
    writer.close()
    os.close(descriptor)
    assert received.startswith(b"%99d\n%99d\n" % (0, 1))
    assert num_said(received) == dropped


@pytest.mark.fault("F37")
def test_writer_whose_reader_is_gone_drops_and_goes_on(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    os.close(read_end)
    writer = logs.LineWriter(write_end)
    writer.put("lost")
    writer.close()
    writer.put("lost too")
    assert writer.num_dropped >= 1


def test_writer_that_is_closed_gives_up_on_a_stopped_reader(pipe: tuple[int, int]) -> None:
    _, write_end = pipe
    writer = logs.LineWriter(write_end)
    for _ in range(2_000):
        writer.put("x" * 99)
    begin_s = time.monotonic()
    writer.close(0.2)
    assert time.monotonic() - begin_s < 30.0


def test_reader_never_sees_half_of_a_line(pipe: tuple[int, int]) -> None:
    """SageMaker's toolkit takes what a read gives it for whole lines."""
    read_end, write_end = pipe
    writer = logs.LineWriter(write_end)
    for number in range(3_000):
        writer.put(f"{number:03} {'x' * (number % 90)}")  # more than the pipe holds
    num_lines = 0
    while num_lines < 3_000:
        chunk = os.read(read_end, 65536)
        assert chunk.endswith(b"\n")
        num_lines += chunk.count(b"\n")
    writer.close()


SCRIPT = """
import logging, sys
from hetero.system import logs
logs.setup_logging_of_script()
logging.getLogger("hetero.loader").info("first of hetero")
library = logging.getLogger("library")
library.setLevel(logging.INFO)
library.addHandler(logging.StreamHandler())
library.info("of a library")
if "configured" in sys.argv:
    logging.basicConfig(format="script: %(message)s", level=logging.INFO)
if "silent" in sys.argv:
    logging.getLogger().addHandler(logging.NullHandler())
logging.getLogger("hetero.loader").info("second of hetero")
logging.getLogger("of.the.script").info("of the script")
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["INFO hetero.loader: first of hetero", "of a library", "INFO hetero.loader: second of hetero"]),
        (["silent"], ["INFO hetero.loader: first of hetero", "of a library", "INFO hetero.loader: second of hetero"]),
        (
            ["silent", "configured"],
            [
                "INFO hetero.loader: first of hetero",
                "of a library",
                "script: second of hetero",
                "script: of the script",
            ],
        ),
        (
            ["configured"],
            [
                "INFO hetero.loader: first of hetero",
                "of a library",
                "script: second of hetero",
                "script: of the script",
            ],
        ),
    ],
    ids=["plain", "with NullHandler", "with both", "with basicConfig"],
)
def test_logging_of_a_script_is_its_own_and_no_line_comes_twice(arguments: list[str], expected: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert process.stderr.splitlines() == expected
