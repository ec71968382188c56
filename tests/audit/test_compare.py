"""Two runs compared: the same data or not, and where they part."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hetero import cli
from hetero.audit.commands import audit_paths
from hetero.audit.ledger import CHAIN_START, chain_value, split_line
from hetero.errors import ConfigError
from tests.support.audit import FACTS, facts, order, run_places, write


def audit(one: Path, other: Path) -> str:
    """Return the answer. Its first words tell whether the data were the same."""
    is_same, text = audit_paths(one, other)
    assert is_same == ("\nThe same data: " in text)
    return text


def is_same(one: Path, other: Path) -> bool:
    return audit_paths(one, other)[0]


def rehash(path: Path, lines: list[bytes]) -> None:
    """Write lines of a ledger with a chain that fits them, as a forger would."""
    chain, content = CHAIN_START, b""
    for line in lines:
        parts = split_line(line)
        assert parts is not None
        chain = chain_value(chain, parts[0])
        content += parts[0] + b',"chain":"' + chain.hex().encode() + b'"}\n'
    path.write_bytes(content)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


def test_audit_of_two_equal_runs_is_the_same_wherever_their_ledgers_lie(runs: tuple[Path, Path]) -> None:
    one, other = runs
    for rank in range(2):
        write(one, run_places(), rank=rank, world_size=2)
        write(other / "hosts" / f"algo-{rank}" / "output", run_places(), rank=rank, world_size=2)
    text = audit(one, other)
    assert "The same data: 20 batches are equal bit for bit." in text
    assert "Notes" not in text
    assert is_same(one / "ledger-rank-1.jsonl", other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"changed": {(1, 2): "other"}}, "the indices are the same, the content differs"),
        ({"other_indices": {(1, 2): [1000, 1001, 1002, 7]}}, "the indices differ"),
        ({"other_indices": {(1, 2): order(1, 2)[::-1]}}, "the indices differ"),
    ],
)
def test_audit_says_where_and_how_runs_part(runs: tuple[Path, Path], change: dict[str, Any], words: str) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places(), **change)
    text = audit(*runs)
    assert (
        f"rank 0, loader train: the first difference is at epoch 1, position 2: {words} (line 10 of A, line 10 of B)"
        in text
    )
    assert "1 of 10 batches differ" in text


def test_audit_tells_the_earliest_place_first(runs: tuple[Path, Path]) -> None:
    for rank, place in ((0, (1, 4)), (1, (0, 3))):
        write(runs[0], run_places(), rank=rank, world_size=2)
        write(runs[1], run_places(), rank=rank, world_size=2, changed={place: "other"})
    text = audit(*runs)
    assert text.index("epoch 0, position 3") < text.index("epoch 1, position 4")


def test_audit_of_a_run_that_ends_early_or_lacks_batches_is_not_the_same(runs: tuple[Path, Path]) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places()[:7], close=False)
    text = audit(*runs)
    assert "B ends before epoch 1, position 2; A has 3 batches from epoch 1, position 2 to epoch 1, position 4" in text
    assert "B, rank 0: it has no end" in text
    holes = [place for place in run_places() if place not in ((0, 3), (0, 4))]  # a journal ahead of the checkpoint
    third = runs[0].parent / "c"
    write(third, holes)
    assert "A lacks epoch 0, position 3 and 1 more, and continues after it" in audit(third, runs[0])


def test_audit_of_a_resumed_run_says_where_it_starts_and_compares_the_rest(runs: tuple[Path, Path]) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places()[6:])
    text = audit(*runs)
    assert "The same data: 4 batches" in text
    assert "B starts at epoch 1, position 1, as a resumed run does; A has 6 batches before that" in text
    apart = runs[0].parent / "c"
    write(apart, run_places(4)[15:])
    assert "no place in common" in audit(runs[0], apart)


def test_audit_of_a_restarted_run_follows_the_last_writing(runs: tuple[Path, Path]) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places()[:7], close=False)
    write(runs[1], run_places()[4:])
    text = audit(*runs)
    assert "The same data: 10 batches" in text
    assert "B, rank 0: 3 batches were delivered again; the last delivery counts" in text


@pytest.mark.parametrize("what", ["indices", "content"])
def test_audit_tells_a_repeated_step_that_differs(runs: tuple[Path, Path], what: str) -> None:
    write(runs[0], run_places())
    first: dict[str, Any] = {"changed": {(1, 0): "x"}} if what == "content" else {"other_indices": {(1, 0): [9]}}
    write(runs[1], run_places()[:7], close=False, **first)
    write(runs[1], run_places()[4:])
    text = audit(*runs)
    assert "B, rank 0, loader train: epoch 1, position 0 was delivered again after a restart" in text
    assert "they part" not in text  # what counts in the end is the same


def test_audit_of_a_restart_that_silently_began_again_differs(runs: tuple[Path, Path]) -> None:
    write(runs[0], run_places(1, 10))
    write(runs[1], run_places(1, 10)[:6], close=False)
    write(runs[1], run_places(1, 4))  # the batches of steps 6 to 9 were those of 0 to 3
    assert "B ends before epoch 0, position 6" in audit(*runs)


def test_audit_of_a_users_sampler_counts_every_time_that_a_place_was_filled(runs: tuple[Path, Path]) -> None:
    drawn = facts(order="sampler")
    for run, last in zip(runs, ([7, 8], [7, 9]), strict=True):
        for indices in ([1, 2], [3, 4], last):
            # One process: the same loader at the same place, for its sampler draws on.
            write(run, [(0, 0)], loader=drawn, other_indices={(0, 0): indices}, close=False)
        text = (run / "ledger-rank-0.jsonl").read_bytes().splitlines()
        rehash(run / "ledger-rank-0.jsonl", [line for at, line in enumerate(text) if at not in (3, 4, 6, 7)])
    text = audit(*runs)
    assert "the first difference is at epoch 0, position 0, time 3" in text
    assert "1 of 3 batches differ" in text
    assert "delivered again" not in text


def test_audit_pairs_loaders_by_what_they_read_then_by_name(runs: tuple[Path, Path]) -> None:
    other_data = facts(dataset="validation", fingerprint="bb", arguments="11")
    write(runs[0], run_places(), loader=FACTS)
    write(runs[0], run_places(), loader=other_data, changed={(0, 0): "validation"})
    write(runs[1], run_places(), loader=other_data, changed={(0, 0): "validation"})
    write(runs[1], run_places(), loader=FACTS)
    assert is_same(*runs)
    moved = runs[0].parent / "c"
    write(moved, run_places(), loader=facts(arguments="99", seed=18))
    text = audit(runs[0], moved)
    assert "only A has loader train" in text
    assert "loader train: seed is 17 in A, 18 in B" in text


def test_audit_explains_a_fingerprint_that_one_run_lacks(runs: tuple[Path, Path]) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places(), loader=facts(fingerprint=None))
    assert is_same(*runs)
    text = audit(*runs)
    assert "loader train: B has no fingerprint of the data set, because its ranks did not build it" in text
    assert "None" not in text


def test_audit_of_loaders_of_other_names_is_not_the_same(runs: tuple[Path, Path]) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places(), loader=facts(name="\x1b[2Jevil\n"))
    text = audit(*runs)
    assert "only A has loader train, with 10 batches" in text
    assert "only B has loader \\x1b[2Jevil\\n" in text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: lines[:5] + lines[6:], "line 6 does not follow from the lines before it"),
        (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], "line 6 does not follow"),
        (lambda lines: [*lines[:5], lines[5].replace(b'"position":3', b'"position":4'), *lines[6:]], "line 6 does not"),
        (lambda lines: [*lines[:5], b"\0" * 30, *lines[6:]], "line 6 is not a line of a ledger"),
        (lambda lines: [*lines[:5], b"x" * 200_000, *lines[6:]], "line 6 is not a line of a ledger"),
    ],
    ids=["removed", "swapped", "changed", "overwritten", "too long"],
)
def test_audit_tells_a_ledger_that_was_tampered_with(runs: tuple[Path, Path], damage: Any, words: str) -> None:
    write(runs[0], run_places())
    path = write(runs[1], run_places())
    path.write_bytes(b"".join(line + b"\n" for line in damage(path.read_bytes().splitlines())))
    text = audit(*runs)
    assert "B, rank 0: the ledger is damaged and was compared only up to there" in text
    assert words in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({b'"position":0,"size"': b'"position":-1,"size"'}, "has position -1"),
        ({b'"epoch":0,"position":0,"size"': b'"epoch":1e3,"position":0,"size"'}, "has epoch 1000.0"),
        ({b'"batch":0': b'"batch":7'}, "is of loader 7, but no earlier line describes that loader"),
        ({b'"indices":"': b'"indices":"g'}, "expected 32 hexadecimal digits"),
        ({b'"batch":0': b'"other":0'}, "is of an unknown kind"),
        ({b'{"batch":0,': b'{"batch":0,,'}, "is not JSON"),
    ],
)
def test_audit_tells_what_no_rank_writes_though_its_chain_fits(
    runs: tuple[Path, Path], line: dict[bytes, bytes], words: str
) -> None:
    write(runs[0], run_places())
    path = write(runs[1], run_places())
    lines = path.read_bytes().splitlines()
    for old, new in line.items():
        assert old in lines[2]
        lines[2] = lines[2].replace(old, new)
    rehash(path, lines)
    assert words in audit(*runs)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"seed":17', b'"seed":[17]', "is wrong at seed: found [17], expected an integer"),
        (b'"name":"train"', b'"name":{}', "is wrong at name: found {}, expected a string"),
        (b'"num_samples":64', b'"num_samples":-64', "is wrong at num_samples: found -64"),
    ],
)
def test_audit_checks_the_facts_of_a_loader(runs: tuple[Path, Path], old: bytes, new: bytes, words: str) -> None:
    write(runs[0], run_places())
    path = write(runs[1], run_places())
    lines = path.read_bytes().splitlines()
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new)
    rehash(path, lines)
    assert words in audit(*runs)


def test_audit_with_other_world_sizes_compares_the_samples_of_global_batches(runs: tuple[Path, Path]) -> None:
    for rank in range(2):
        write(runs[0], run_places(), rank=rank, world_size=2)
    for rank in range(4):
        write(runs[1], run_places(), rank=rank, world_size=4)
    text = audit(*runs)
    assert "The same data: 10 batches are equal by the samples of their global batches" in text
    for rank in range(4):
        (runs[1] / f"ledger-rank-{rank}.jsonl").unlink()
        write(runs[1], run_places(), rank=rank, world_size=4, other_indices={(1, 3): [rank]} if rank == 2 else {})
    assert "loader train: the first difference is at epoch 1, position 3: the samples differ; 1 of 10" in audit(*runs)
    (runs[1] / "ledger-rank-3.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"B has no ledger of rank 3, .*\n.*the run's whole folder"):
        audit(*runs)


def test_audit_of_a_run_that_went_on_with_another_world_size(runs: tuple[Path, Path]) -> None:
    for rank in range(4):
        write(runs[0], run_places(), rank=rank, world_size=4)
        write(runs[1], run_places()[:7], rank=rank, world_size=4, close=False)
    for rank in range(2):
        write(runs[1], run_places()[5:], rank=rank, world_size=2)
    assert is_same(*runs)


def test_audit_with_ledgers_missing_says_of_whom(runs: tuple[Path, Path]) -> None:
    for rank in range(3):
        write(runs[0], run_places(), rank=rank, world_size=4)
    write(runs[1], run_places(), rank=0, world_size=4)
    text = audit(*runs)
    assert "B has no ledger of rank 1, 2" in text
    assert "neither run has a ledger of rank 3" in text


def test_audit_command_has_the_documented_exit_status(runs: tuple[Path, Path], capsys: Any) -> None:
    write(runs[0], run_places())
    write(runs[1], run_places(), changed={(0, 1): "other"})
    assert cli.main(["audit", str(runs[0]), str(runs[0])]) == 0
    assert cli.main(["audit", str(runs[0]), str(runs[1])]) == 1
    assert "the first difference is at epoch 0, position 1" in capsys.readouterr().out
    assert cli.main(["audit", str(runs[0]), str(runs[0].parent / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_audit_of_what_is_no_run_says_so(runs: tuple[Path, Path]) -> None:
    path = write(runs[0], run_places())
    runs[1].mkdir()
    with pytest.raises(ConfigError, match=r"contains no ledger\n.*--audit"):
        audit(*runs)
    write(runs[0] / "again", run_places())
    with pytest.raises(ConfigError, match="two ledgers of rank 0"):
        audit(runs[0], runs[0])
    text = runs[1] / "ledger-rank-0.jsonl"
    text.write_text("a photo\n")
    with pytest.raises(ConfigError, match="is not a ledger"):
        audit(path, text)
    rehash(text, [path.read_bytes().splitlines()[0].replace(b'{"ledger":1', b'{"ledger":9')])
    with pytest.raises(ConfigError, match="has version 9, this hetero reads 1"):
        audit(path, text)
    text.unlink()
    path = write(runs[0] / "two", run_places(), rank=0, world_size=2)
    third = write(runs[1], run_places(), rank=1, world_size=2)
    with pytest.raises(ConfigError, match="ledgers belong to different ranks: A has rank 0 and B has rank 1"):
        audit(path, third)
    third.rename(runs[1] / "ledger-rank-0.jsonl")
    with pytest.raises(ConfigError, match="belongs to rank 1, but its name states rank 0"):
        audit(runs[0] / "two", runs[1])


def test_audit_of_a_long_run_takes_bounded_memory(runs: tuple[Path, Path]) -> None:
    num_batches = 10_000
    places = [(epoch, position) for epoch in range(5) for position in range(num_batches // 5)]
    for run in runs:
        write(run, places)
    tracemalloc.start()
    try:
        assert is_same(*runs)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes / num_batches < 1_000  # both ledgers and what sorting takes: under 1 GB for 10^6
    assert struct.calcsize("<iiqqqq16s16s16s") == 88


@pytest.mark.parametrize("world_size", [b"1e999", b"1000000000000", b"-1"])
def test_audit_takes_no_world_size_from_beyond_damage(runs: tuple[Path, Path], world_size: bytes) -> None:
    for run in runs:
        write(run, run_places())
    path = runs[1] / "ledger-rank-0.jsonl"
    forged = path.read_bytes().splitlines()[0].replace(b'"world_size":1', b'"world_size":' + world_size)
    path.write_bytes(path.read_bytes() + forged + b"\n")
    tracemalloc.start()
    text = audit(*runs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "the ledger is damaged" in text
    assert "rank 0" in text
    assert peak < 10**8


@pytest.mark.parametrize("world_size", [b"1e999", b"1000000000000"])
def test_audit_of_a_forged_world_size_is_damage_or_no_ledger(runs: tuple[Path, Path], world_size: bytes) -> None:
    write(runs[0], run_places())
    path = write(runs[1], run_places())
    lines = [line.replace(b'"world_size":1', b'"world_size":' + world_size) for line in path.read_bytes().splitlines()]
    rehash(path, lines)
    with pytest.raises(ConfigError, match="is not a ledger"):
        audit_paths(*runs)
