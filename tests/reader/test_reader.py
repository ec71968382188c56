"""The reader in its consumer's thread: order, bytes, its window, and how it ends."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import textwrap
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.errors import AuthenticationError, ConfigError, EndpointUnavailableError, HeteroError
from hetero.reader.reader import Reader, default_window_bytes
from hetero.system.cgroups import MemoryUse
from tests.support.batch_path.calls import Measured

BUFFERS = """
    class Buffered(Numbers):
        def __init__(self):
            super().__init__(100, -1, -1, "", 0.0, 1)
            self.buffer = np.zeros(1_000_000, dtype=np.int64)

        def __getitems__(self, indices):
            return np.take(np.arange(100), np.repeat(indices, len(self.buffer)), out=self.buffer)

    @hetero.dataset(seeding="batch", fingerprint="together")
    def together():
        return Buffered()

    class Own:
        pass

    class Owner(Numbers):
        def __getitem__(self, index):
            own = Own()
            own.index = index
            return own

    def fill(samples, *, collate_fn_map):
        shared[:] = samples[0].index
        return shared

    @hetero.dataset(fingerprint="registered")
    def registered():
        from torch.utils.data._utils.collate import default_collate_fn_map

        default_collate_fn_map[Own] = fill
        return Owner(100, -1, -1, "", 0.0, 1)
"""

LARGE_BATCH = """
    def fill_large(samples):
        num_mib = samples[0]["index"]
        batch = np.zeros(num_mib * 2**20, dtype=np.uint8)
        batch[:: 2**20] = np.arange(num_mib) % 251
        return batch

    @hetero.dataset(collate_fn=fill_large, fingerprint="large")
    def large():
        return Numbers(1000, -1, -1, "", 0.0, 1)
"""


@pytest.mark.parametrize("num_endpoints", [1, 2, 3])
def test_reader_delivers_local_bytes_in_order_for_any_number_of_endpoints(
    shared_job: Any, tools: Any, num_endpoints: int
) -> None:
    shared_job.pool(num_endpoints=num_endpoints)
    fleet = shared_job.fleet()
    wanted = tools.requests(tools.spec())
    assert fleet.describe(wanted[0].spec).num_samples == 100
    with Reader(fleet, iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))
    assert fleet.stats.batches == len(wanted)
    assert fleet.stats.received_bytes > 0
    assert fleet.stats.retries == 0


def test_reader_collation_that_reuses_its_buffer_delivers_each_batch_whole(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    wanted = tools.requests(tools.spec("reusing"), num_batches=24, batch_size=1)
    for request, batch in zip(wanted, Reader(shared_job.fleet(), iter(wanted), prefetch_factor=6), strict=True):
        assert np.unique(batch).tolist() == request.work.indices.tolist()


def test_reader_default_collation_that_passes_a_buffer_on_delivers_each_batch_whole(job: Any, tools: Any) -> None:
    pytest.importorskip("torch")
    job.script.write_text(job.script.read_text() + textwrap.dedent(BUFFERS))
    job.pool()
    for name in ("together", "registered"):
        wanted = tools.requests(tools.spec(name), num_batches=12, batch_size=1)
        for request, batch in zip(wanted, Reader(job.fleet(), iter(wanted), prefetch_factor=6), strict=True):
            assert np.unique(batch).tolist() == request.work.indices.tolist(), name


def test_reader_before_any_endpoint_waits_for_the_first(job: Any, tools: Any) -> None:
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(), num_batches=3)
    reader = Reader(fleet, iter(wanted))
    job.pool()
    assert tools.digest(list(reader)) == tools.digest(tools.local(job.script, wanted))


def test_reader_closed_early_frees_its_threads_and_endpoint(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    fleet = shared_job.fleet()
    slow = tools.spec(sample_s=0.05)
    for _ in range(3):
        reader = Reader(fleet, iter(tools.requests(slow, num_batches=12)))
        next(reader)
        reader.close()
        reader.close()
        assert list(reader) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-fetcher")]


def test_reader_dropped_without_close_is_collected(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    reader = Reader(shared_job.fleet(), iter(tools.requests(tools.spec())))
    next(reader)
    del reader
    gc.collect()
    tools.wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-fetcher")])


def test_reader_closed_while_nobody_answers_returns(shared_job: Any, tools: Any) -> None:
    reader = Reader(shared_job.fleet(), iter(tools.requests(tools.spec())))
    reader.close()
    assert next(reader, None) is None


def test_readers_share_a_fleet(shared_job: Any, tools: Any) -> None:
    shared_job.pool(num_endpoints=2)
    fleet = shared_job.fleet()
    train, validate = tools.requests(tools.spec(width=4)), tools.requests(tools.spec(width=16), seed=9)
    pairs = list(zip(Reader(fleet, iter(train)), Reader(fleet, iter(validate)), strict=True))
    assert tools.digest([one for one, _ in pairs]) == tools.digest(tools.local(shared_job.script, train))
    assert tools.digest([other for _, other in pairs]) == tools.digest(tools.local(shared_job.script, validate))


def test_reader_takes_requests_in_the_consuming_thread_and_no_further_than_the_window(
    shared_job: Any, tools: Any
) -> None:
    shared_job.pool()
    taken: list[threading.Thread] = []

    def count() -> Any:
        for request in tools.requests(tools.spec()):
            taken.append(threading.current_thread())
            yield request

    reader = Reader(shared_job.fleet(), count(), prefetch_factor=3)
    reader._window._growth.is_held_up = lambda **_: False  # type: ignore[method-assign]  # batches that overtake
    assert len(taken) <= 3
    for delivered in range(1, 5):
        next(reader)
        assert len(taken) == 3 + delivered
    assert set(taken) == {threading.current_thread()}


def test_reader_bounds_its_window_in_bytes(shared_job: Any, tools: Any) -> None:
    shared_job.pool(num_endpoints=2)
    fleet = shared_job.fleet()
    wanted = tools.requests(tools.spec(width=1000))
    with Reader(fleet, iter(wanted), window_bytes=1) as reader:
        for expected, batch in zip(wanted, reader, strict=True):
            assert (batch["index"] == expected.work.indices).all()
            assert reader._window._held_bytes == 0
            assert len(reader._window.outcomes) <= 1


def test_reader_raises_the_samplers_exception_in_its_turn(shared_job: Any, tools: Any) -> None:
    shared_job.pool()

    def broken() -> Any:
        yield from tools.requests(tools.spec(), num_batches=3)
        raise LookupError("the sampler is broken")

    reader = Reader(shared_job.fleet(), broken())
    assert len(list(itertools.islice(reader, 3))) == 3
    with pytest.raises(LookupError, match="sampler"):
        next(reader)


def test_reader_interrupted_in_the_sampler_ends_at_once(shared_job: Any, tools: Any) -> None:
    shared_job.pool()

    def interrupted() -> Any:
        yield from tools.requests(tools.spec(), num_batches=4)
        raise KeyboardInterrupt

    reader = Reader(shared_job.fleet(), interrupted(), prefetch_factor=2)
    with pytest.raises(KeyboardInterrupt):  # with batches still on their way
        list(reader)


def test_reader_wrong_token_is_an_error_at_once(shared_job: Any, tools: Any) -> None:
    from hetero.control.security import Token

    shared_job.pool()
    fleet = shared_job.fleet(token=Token.generate())
    with pytest.raises(AuthenticationError, match="algo-1/0"):
        next(Reader(fleet, iter(tools.requests(tools.spec()))))
    with pytest.raises(AuthenticationError):
        fleet.describe(tools.spec())


@pytest.mark.fault("F31")
def test_reader_of_another_job_is_rejected_by_name(job: Any, tools: Any) -> None:
    job.pool()
    fleet = job.fleet(job_id="other", prepare_timeout_s=0.5, data_timeout_s=0.5)
    with pytest.raises(EndpointUnavailableError, match="this server belongs to job test-job"):
        fleet.describe(tools.spec())


@pytest.mark.fault("F24")
@pytest.mark.parametrize("num_mib", [80, pytest.param(600, marks=pytest.mark.long)])
def test_large_batch_below_the_limit_comes_whole(job: Any, tools: Any, measured: Measured, num_mib: int) -> None:
    if psutil.virtual_memory().available < 4 * 2**30:
        pytest.skip("needs 4 GiB of memory")
    job.script.write_text(job.script.read_text() + textwrap.dedent(LARGE_BATCH))
    job.pool()
    request = BatchRequest(spec=tools.spec("large"), work=IndexedWork(np.array([num_mib])), seed=0, epoch=0, position=0)
    fleet = job.fleet()
    fleet.describe(request.spec)
    begin_s = time.monotonic()
    batch = next(Reader(fleet, iter([request])))
    measured("large_batch_s", time.monotonic() - begin_s)
    assert batch.shape == (num_mib * 2**20,)
    assert (batch[:: 2**20] == np.arange(num_mib) % 251).all()
    assert int(np.count_nonzero(batch)) == np.count_nonzero(np.arange(num_mib) % 251)
    assert (fleet.stats.batches, fleet.stats.retries) == (1, 0)


def test_reader_waiting_long_says_for_whom_and_again_when_twice_the_time_has_passed(
    shared_job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero.reader.reader.LOG_INTERVAL_S", 0.4)
    reader = Reader(shared_job.fleet(prepare_timeout_s=2.6, data_timeout_s=2.6), iter(tools.requests(tools.spec())))
    with caplog.at_level(logging.WARNING), pytest.raises(EndpointUnavailableError, match="no endpoint has appeared"):
        next(reader)
    said = [record for record in caplog.records if "waiting for batch 0 for" in record.message]
    assert 2 <= len(said) <= 3  # after 0.5, 1 and 2 s: it looks twice a second


def test_reader_with_unusable_bounds_is_refused(shared_job: Any) -> None:
    with pytest.raises(ConfigError, match="prefetch_factor is 0"):
        Reader(shared_job.fleet(), iter([]), prefetch_factor=0)
    with pytest.raises(ConfigError, match="window_bytes is -1"):
        Reader(shared_job.fleet(), iter([]), window_bytes=-1)


def limited(limit_gib: int | None) -> MemoryUse:
    """Return what a control group says of itself."""
    return MemoryUse(peak_bytes=0, limit_bytes=None if limit_gib is None else limit_gib * 2**30, is_own=True)


@pytest.mark.parametrize(
    ("num_ranks", "memory_gib", "use", "expected"),
    [
        ("1", 64, None, 2**30),
        ("64", 64, limited(None), 2**28),
        ("", 2, None, 2**29),
        ("-3", 2, None, 2**29),
        ("1", 64, limited(2), 2**29),
        ("4", 64, limited(2), 2**27),
        ("1", 2, limited(64), 2**29),
    ],
)
def test_window_is_this_ranks_share_of_a_quarter_of_memory_and_at_most_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch, num_ranks: str, memory_gib: int, use: MemoryUse | None, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory_gib * 2**18}.__getitem__)
    monkeypatch.setattr("hetero.reader.reader.memory_use", lambda: use)
    assert default_window_bytes() == expected


def test_fleet_in_a_forked_child_is_refused_and_harmless(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    fleet = shared_job.fleet()
    reader = Reader(fleet, iter(tools.requests(tools.spec())))
    next(reader)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            reader.close()
            fleet.close()
            for use in (lambda: fleet.describe(tools.spec()), lambda: next(reader), lambda: Reader(fleet, iter([]))):
                with pytest.raises(HeteroError, match="forked"):
                    use()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    next(reader)
