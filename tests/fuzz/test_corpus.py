"""What the fuzzer found worth keeping, and frames mutated by the hundred thousand: nothing but documented errors."""

from __future__ import annotations

import random
import tracemalloc
import zipfile
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.purity.comparison import compare
from hetero.wire.framing import BatchDecoder
from tests.fuzz.fuzz_decoder import CORPUS
from tests.support.fuzz.seeds import BATCHES, answer, seeds
from tests.support.fuzz.targets import LIMITS, TARGETS, run, split_answer
from tests.support.wire.damage import mutate

pytest.importorskip("torch")  # imported before memory is counted
pytest.importorskip("lz4.block")
pytest.importorskip("zstandard")
pytestmark = [pytest.mark.attack("A3"), pytest.mark.attack("A5"), pytest.mark.attack("A6"), pytest.mark.attack("A7")]


def test_every_seed_is_accepted_by_its_parser() -> None:
    outcomes = Counter(f"{data[0]} {run(data)}" for data in seeds())
    assert {int(name.split()[0]) for name in outcomes} == set(range(len(TARGETS)))
    refused = {name for name in outcomes if not name.endswith("accepted")}
    assert refused == {"0 DatasetError", "0 CallFailedError"}


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_answer_that_is_whole_gives_the_batch(batch: object) -> None:
    message, payload = split_answer(answer(batch))
    decoder = BatchDecoder(LIMITS)
    decoder.take_message(message)
    while not decoder.done:
        room = decoder.room()
        room[:] = payload[: len(room)]
        payload = payload[len(room) :]
        decoder.filled(len(room))
    assert compare(batch, decoder.result()) is None


def test_corpus_of_the_fuzzer_raises_nothing_undocumented() -> None:
    with zipfile.ZipFile(CORPUS) as archive:
        contents = [archive.read(name) for name in archive.namelist()]
    assert len(contents) > 50
    outcomes = Counter(run(data) for data in contents)
    assert outcomes["accepted"] > 5
    assert outcomes["ProtocolError"] > 20


@pytest.mark.parametrize("num_frames", [10_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_mutated_frames_raise_nothing_undocumented_and_allocate_nothing_beyond_the_limits(num_frames: int) -> None:
    rng = random.Random(f"frames {num_frames}")
    given = seeds()
    outcomes: Counter[str] = Counter()
    most = 0
    for data in given:  # imports and caches of the first use are not allocations for a frame
        run(data)
    tracemalloc.start()
    try:
        for _ in range(num_frames):
            data = rng.choice(given)
            hostile = data[:1] + mutate(data[1:], rng)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            outcomes[run(hostile)] += 1
            held, peak = tracemalloc.get_traced_memory()
            most = max(most, peak - before)
    finally:
        tracemalloc.stop()
    assert sum(outcomes.values()) == num_frames
    # The limits here are 64 KiB a batch. The rest is protobuf's and numpy's for a few kilobytes of message.
    assert most < 2 * LIMITS.max_batch_bytes
    # The decoder keeps the last 256 structures that it has accepted, each of a few kilobytes here.
    assert held < 32 * LIMITS.max_batch_bytes
    # Both sides of every check were seen.
    assert outcomes["accepted"] > num_frames // 50
    assert outcomes["ProtocolError"] + outcomes["ChecksumError"] > num_frames // 4


@given(data=st.binary(max_size=200))
def test_noise_raises_nothing_undocumented(data: bytes) -> None:
    for target in range(len(TARGETS)):
        run(bytes([target]) + data)


@given(source=st.data())
def test_spliced_frames_raise_nothing_undocumented(source: st.DataObject) -> None:
    """The beginning of one valid frame, the end of another: what mutation by bytes hardly reaches."""
    given = seeds()
    first, second = source.draw(st.sampled_from(given)), source.draw(st.sampled_from(given))
    at, end = source.draw(st.integers(1, len(first))), source.draw(st.integers(1, len(second)))
    run(first[:at] + second[end:])
