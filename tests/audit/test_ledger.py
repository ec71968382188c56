"""The ledger as a file: its chain, its continuation, and what it does when it cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hetero.audit import ledger as ledgers
from hetero.audit.ledger import CHAIN_START, DIRECTORY_VARIABLE, Ledger, Writer, chain_value, split_line
from hetero.audit.reading import read_ledger
from tests.support.audit import FACTS, entry, facts, run_places, write

WRITER = Writer(job="job-1", rank=0, world_size=1)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ledger_lines_are_chained_json_from_beginning_to_end(tmp_path: Path) -> None:
    path = write(tmp_path / "new" / "folder", [(0, 0), (0, 1)])
    assert path.name == "ledger-rank-0.jsonl"
    first, loader, *batches, end = lines(path)
    assert (first["ledger"], first["job"], first["rank"], first["world_size"]) == (1, "job-1", 0, 1)
    assert (loader["name"], loader["fingerprint"], loader["seed"], loader["global_batch"], loader["order"]) == (
        *("train", "aa", 17, 4),
        "shuffled",
    )
    assert (loader["epoch"], loader["position"]) == (0, 0)
    assert [(batch["epoch"], batch["position"], batch["size"]) for batch in batches] == [(0, 0, 4), (0, 1, 4)]
    assert end["end"] == 2
    chain = CHAIN_START
    for line in path.read_bytes().splitlines():
        parts = split_line(line)
        assert parts is not None
        chain = chain_value(chain, parts[0])
        assert chain == parts[1]


def test_ledger_of_a_restart_goes_on_in_the_same_file_and_says_where(tmp_path: Path) -> None:
    write(tmp_path, run_places(1), close=False)
    path = write(tmp_path, [(0, 3), (0, 4), (1, 0)])
    record = read_ledger(path)
    assert len(record.sections) == 2
    assert len(record.entries) == 8
    assert (record.damage, record.has_end) == ("", True)
    starts = [(line["epoch"], line["position"]) for line in lines(path) if "loader" in line]
    assert starts == [(0, 0), (0, 3)]


@pytest.mark.parametrize("torn", [b'{"ba', b"\0\0\0", b'{"batch":0,"epoch":0}'])
def test_ledger_torn_last_line_is_left_out_and_cut_off_by_the_next_process(tmp_path: Path, torn: bytes) -> None:
    path = write(tmp_path, [(0, 0)], close=False)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    record = read_ledger(path)
    assert (len(record.entries), record.damage) == (1, "")
    assert any("last line is incomplete" in note for note in record.notes)
    write(tmp_path, [(0, 1)])
    assert path.read_bytes().startswith(whole + b'{"ledger"')
    assert read_ledger(path).damage == ""


def test_ledger_torn_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger-rank-0.jsonl"
    path.write_bytes(b'{"ledger":1,"het')
    write(tmp_path, [(0, 0)])
    assert len(read_ledger(path).entries) == 1


@pytest.mark.parametrize("content", [b"a photo\n", b"a photo", b"x" * 300_000])
def test_ledger_never_writes_to_what_is_none(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger-rank-0.jsonl"
    path.write_bytes(content)
    ledger = Ledger(tmp_path, WRITER)
    ledger.add(FACTS, entry(0, 0, [1]))
    ledger.close()
    assert path.read_bytes() == content
    assert ledger.num_lost == 1
    assert "no batch of this process is in it" in caplog.text


def test_ledger_is_not_written_through_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "elsewhere"
    target.touch()
    (tmp_path / "ledger-rank-0.jsonl").symlink_to(target)
    Ledger(tmp_path, WRITER).close()
    assert target.read_bytes() == b""
    assert "cannot be opened" in caplog.text


def test_ledger_on_a_file_system_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    Ledger(tmp_path, WRITER).close()
    assert (tmp_path / "ledger-rank-0.jsonl").read_text()


def test_ledger_that_another_process_writes_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Ledger(tmp_path, WRITER)
    second = Ledger(tmp_path, WRITER)
    assert "another process is writing it" in caplog.text
    for ledger in (first, second):
        ledger.add(FACTS, entry(0, 0, [1]))
        ledger.close()
    assert (first.num_batches, second.num_batches) == (1, 0)
    assert len(read_ledger(first.path).entries) == 1


@pytest.mark.fault("F27")
def test_ledger_disk_full_is_named_once_and_what_is_there_stays_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path, WRITER)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))  # a write beyond it is cut short, then fails
    try:
        for position in range(100):
            ledger.add(FACTS, entry(0, position, [position]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ledger.close()
    assert 0 < ledger.num_batches < 100
    assert ledger.num_batches + ledger.num_lost == 100
    record = read_ledger(ledger.path)
    assert (len(record.entries), record.damage, record.has_end) == (ledger.num_batches, "", False)
    assert ledger.path.read_bytes().endswith(b"}\n")
    assert caplog.text.count("cannot be written") == 1
    assert f"ends before loader train, epoch 0, position {ledger.num_batches}" in caplog.text
    assert f"lacks {ledger.num_lost} batches" in caplog.text


def test_ledger_folder_that_cannot_be_made_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    ledger = Ledger(tmp_path / "file", WRITER)
    ledger.add(FACTS, entry(0, 0, [1]))
    ledger.close()
    assert caplog.text.count("cannot be opened") == 1
    assert "lacks 1 batches" in caplog.text


def test_ledger_of_a_killed_process_has_every_batch(tmp_path: Path) -> None:
    program = """
        import os, pathlib, signal, sys
        sys.path[:0] = [sys.argv[2]]
        from tests.support.audit import FACTS, entry
        from hetero.audit.ledger import Ledger, Writer
        ledger = Ledger(pathlib.Path(sys.argv[1]), Writer(job="", rank=0, world_size=1))
        for position in range(50):
            ledger.add(FACTS, entry(0, position, [position]))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(Path(__file__).parents[2])]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    record = read_ledger(tmp_path / "ledger-rank-0.jsonl")
    assert (len(record.entries), record.has_end) == (50, False)
    assert any("no end" in note for note in record.notes)


def test_current_ledger_follows_the_environment_and_stays_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert ledgers.current(lambda: WRITER) is None
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    ledger = ledgers.current(lambda: WRITER)
    assert ledger is not None
    assert ledgers.current(lambda: pytest.fail("asked again who writes")) is ledger
    child = os.fork()
    if child == 0:
        os._exit(0 if ledgers._current is None and ledger._descriptor is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ledger.add(FACTS, entry(0, 0, [1]))
    ledger.add(facts(name="validation"), entry(0, 0, [2]))
    ledgers.close_current()
    ledgers.close_current()
    record = read_ledger(ledger.path)
    assert [loader.name for loader in record.loaders] == ["train", "validation"]
    assert record.has_end
    last = split_line(ledger.path.read_bytes().splitlines()[-1])
    assert last is not None
    assert f"2 batches, chain {last[1].hex()}" in caplog.text
