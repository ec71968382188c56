from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from calls import Asked, newest_in_progress

from hetero.batches.request import BatchRequest
from hetero.config import Timings
from hetero.control.directory import Directory
from hetero.dataplane.connection import ConnectionState
from hetero.dataplane.reader import Reader, default_window_bytes
from hetero.errors import (
    AuthenticationError,
    ConfigError,
    DatasetError,
    EndpointUnavailableError,
    ExitCode,
    HeteroError,
)

Measured = Callable[[str, float], None]
REISSUED_S = 2.0
"""Promised: from the death of an endpoint, where the kernel tells, to its requests being asked for elsewhere."""

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
        batch = np.zeros(600 * 2**20, dtype=np.uint8)
        batch[:: 2**20] = np.arange(600) % 251
        return batch

    @hetero.dataset(collate_fn=fill_large, fingerprint="large")
    def large():
        return Numbers(100, -1, -1, "", 0.0, 1)
"""


@pytest.mark.parametrize("num_endpoints", [1, 2, 3])
def test_reader_delivers_local_bytes_in_order_for_any_number_of_endpoints(
    job: Any, tools: Any, num_endpoints: int
) -> None:
    job.pool(num_endpoints=num_endpoints)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec())
    assert fleet.describe(wanted[0].spec).num_samples == 100
    with Reader(fleet, iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.batches == len(wanted)
    assert fleet.stats.received_bytes > 0
    assert fleet.stats.retries == 0


def test_reader_collation_that_reuses_its_buffer_delivers_each_batch_whole(job: Any, tools: Any) -> None:
    job.pool()
    wanted = tools.requests(tools.spec("reusing"), num_batches=24, batch_size=1)
    for request, batch in zip(wanted, Reader(job.fleet(), iter(wanted), prefetch_factor=6), strict=True):
        assert np.unique(batch).tolist() == request.indices.tolist()


@pytest.mark.parametrize("name", ["together", "registered"])
def test_reader_default_collation_that_passes_a_buffer_on_delivers_each_batch_whole(
    job: Any, tools: Any, name: str
) -> None:
    pytest.importorskip("torch")
    job.script.write_text(job.script.read_text() + textwrap.dedent(BUFFERS))
    job.pool()
    wanted = tools.requests(tools.spec(name), num_batches=24, batch_size=1)
    for request, batch in zip(wanted, Reader(job.fleet(), iter(wanted), prefetch_factor=6), strict=True):
        assert np.unique(batch).tolist() == request.indices.tolist()


def test_reader_before_any_endpoint_waits_for_the_first(job: Any, tools: Any) -> None:
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(), num_batches=3)
    reader = Reader(fleet, iter(wanted))
    job.pool()
    assert tools.digest(list(reader)) == tools.digest(tools.local(job.script, wanted))


@pytest.mark.fault("F1")
@pytest.mark.fault("F3")
def test_reader_loses_one_of_two_endpoints_and_delivers_the_same(
    job: Any, tools: Any, asked: list[Asked], measured: Measured
) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(sample_s=0.02), num_batches=20)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(8)]
    victim = newest_in_progress(asked)
    killed_s = time.monotonic()
    os.kill(pool.pids[int(victim.endpoint[0].rpartition("/")[2])], signal.SIGKILL)
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    in_work = [each for each in asked if each.endpoint == victim.endpoint and each.at_s < killed_s]
    lost = {each.position for each in in_work if not each.is_answered}
    assert victim.position in lost
    assert fleet.stats.failovers >= len(lost)  # the kernel told: no hedge helped out
    elsewhere = [each for each in asked if each.endpoint != victim.endpoint and each.at_s > killed_s]
    reissued_s = max(min(each.at_s for each in elsewhere if each.position == position) for position in lost) - killed_s
    measured("asked_elsewhere_s", reissued_s)
    assert reissued_s < REISSUED_S
    assert fleet.stats.endpoint_losses == 1
    tools.wait_for(lambda: len(pool.records) == 2)
    assert pool.num_restarts == 1


def test_reader_loses_idle_endpoints_and_blames_no_batch(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=5)
    published, job.directory = job.directory, Directory(pool.records)  # nobody tells the reader
    fleet = job.fleet()
    job.directory = published
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet.describe(tools.spec())
    tools.wait_for(lambda: all(connection.serves(tools.spec()) for connection in fleet._used))
    reader = Reader(fleet, iter(wanted))
    found: list[Any] = []

    def take() -> None:
        """Take a batch, and wait for the one that is asked for instead."""
        found.append(next(reader))
        tools.wait_for(lambda: not reader._window._attempts and not reader._window._missing)

    take()
    for pid in pool.pids[:4]:
        os.kill(pid, signal.SIGKILL)
    tools.wait_for(lambda: pool.num_restarts == 4)
    take()
    take()  # one of the two was given to all that are gone, one after the other
    assert fleet.stats.endpoint_losses == 4
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.failovers >= 4


@pytest.mark.fault("F4")
def test_reader_loses_the_only_endpoint_and_goes_on_with_its_successor(job: Any, tools: Any) -> None:
    pool = job.pool()
    before = pool.records[0]
    wanted = tools.requests(tools.spec())
    found = []
    for batch in Reader(job.fleet(), iter(wanted)):
        found.append(batch)
        if len(found) == 4:
            os.kill(pool.pids[0], signal.SIGKILL)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert pool.records[0].endpoint_id == before.endpoint_id
    assert pool.records[0].incarnation != before.incarnation


@pytest.mark.fault("F4")
def test_reader_without_restarts_names_the_lost_endpoint(job: Any, tools: Any, measured: Measured) -> None:
    pool = job.pool(endpoint_restarts=0)
    fleet = job.fleet(data_timeout_s=0.5, prepare_timeout_s=0.5)
    reader = Reader(fleet, iter(tools.requests(tools.spec(sample_s=0.005), num_batches=1000)))
    next(reader)
    killed_s = time.monotonic()
    os.kill(pool.pids[0], signal.SIGKILL)
    message = r"no endpoint served data set 'numbers' for(?s:.)*algo-1/0"
    with pytest.raises(EndpointUnavailableError, match=message) as caught:
        list(reader)
    waited_s = time.monotonic() - killed_s
    measured("given_up_after_s", waited_s)
    assert waited_s > 0.5  # not before the data timeout
    assert caught.value.exit_code is ExitCode.DATA_PLANE_LOST
    assert next(reader, "closed") == "closed"
    tools.wait_for(lambda: pool.failure is not None)
    assert "SIGKILL" in str(pool.failure)


@pytest.mark.fault("F34")
def test_reader_survives_a_drained_host(job: Any, tools: Any, asked: list[Asked]) -> None:
    pools = {f"algo-{number}/0": job.pool(f"algo-{number}") for number in (1, 2)}
    wanted = tools.requests(tools.spec(sample_s=0.04), num_batches=14)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(5)]
    newest = newest_in_progress(asked)
    tools.wait_for(lambda: time.monotonic() - newest.at_s > 0.05)  # it has long reached the endpoint
    in_work = [each for each in asked if each.endpoint == newest.endpoint and each.is_answered is None]
    assert newest in in_work
    pools[newest.endpoint[0]].stop(5.0)
    tools.wait_for(lambda: all(each.is_answered is not None for each in in_work), 10.0)
    assert all(each.is_answered for each in in_work), in_work  # finished, not given up
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))


@pytest.mark.fault("F33")
def test_reader_uses_an_endpoint_that_joins_later(job: Any, tools: Any, asked: list[Asked], measured: Measured) -> None:
    job.pool("algo-1")
    fleet = job.fleet()
    reader = Reader(fleet, iter(tools.requests(tools.spec(), num_batches=10_000)))
    next(reader)
    joined_s: list[float] = []
    job.directory.subscribe(lambda: joined_s.append(time.monotonic()))
    job.pool("algo-2")

    def newcomer_served() -> bool:
        next(reader)
        return job.pools[1].statistics().get("num_batches", 0) > 0

    tools.wait_for(newcomer_served)
    first_s = next(each.at_s for each in asked if each.endpoint[0] == "algo-2/0") - joined_s[0]
    measured("gets_work_s", first_s)
    assert first_s < Timings().heartbeat_s


def test_reader_closed_early_frees_its_threads_and_endpoint(job: Any, tools: Any) -> None:
    job.pool()
    fleet = job.fleet()
    slow = tools.spec(sample_s=0.05)
    for _ in range(3):
        reader = Reader(fleet, iter(tools.requests(slow, num_batches=12)))
        next(reader)
        reader.close()
        reader.close()
        assert list(reader) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-lane")]


def test_reader_dropped_without_close_is_collected(job: Any, tools: Any) -> None:
    job.pool()
    reader = Reader(job.fleet(), iter(tools.requests(tools.spec())))
    next(reader)
    del reader
    gc.collect()
    tools.wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-lane")])


def test_reader_closed_while_nobody_answers_returns(job: Any, tools: Any) -> None:
    reader = Reader(job.fleet(), iter(tools.requests(tools.spec())))
    reader.close()
    assert next(reader, None) is None


def test_readers_share_a_fleet(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    train, validate = tools.requests(tools.spec(width=4)), tools.requests(tools.spec(width=16), seed=9)
    pairs = list(zip(Reader(fleet, iter(train)), Reader(fleet, iter(validate)), strict=True))
    assert tools.digest([one for one, _ in pairs]) == tools.digest(tools.local(job.script, train))
    assert tools.digest([other for _, other in pairs]) == tools.digest(tools.local(job.script, validate))


def test_reader_takes_requests_in_the_consuming_thread_and_no_further_than_the_window(job: Any, tools: Any) -> None:
    job.pool()
    taken: list[threading.Thread] = []

    def count() -> Any:
        for request in tools.requests(tools.spec(sample_s=0.005)):  # so that none overtakes another on its way
            taken.append(threading.current_thread())
            yield request

    reader = Reader(job.fleet(), count(), prefetch_factor=3)
    assert len(taken) <= 3
    for delivered in range(1, 5):
        next(reader)
        assert len(taken) == 3 + delivered
    assert set(taken) == {threading.current_thread()}


def test_reader_bounds_its_window_in_bytes(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(width=1000))
    with Reader(fleet, iter(wanted), window_bytes=1) as reader:
        for expected, batch in zip(wanted, reader, strict=True):
            assert (batch["index"] == expected.indices).all()
            assert reader._window._held_bytes == 0
            assert len(reader._window.outcomes) <= 1


def test_reader_raises_the_samplers_exception_in_its_turn(job: Any, tools: Any) -> None:
    job.pool()

    def broken() -> Any:
        yield from tools.requests(tools.spec(), num_batches=3)
        raise LookupError("the sampler is broken")

    reader = Reader(job.fleet(), broken())
    assert len(list(itertools.islice(reader, 3))) == 3
    with pytest.raises(LookupError, match="sampler"):
        next(reader)


def test_reader_interrupted_in_the_sampler_ends_at_once(job: Any, tools: Any) -> None:
    job.pool()

    def interrupted() -> Any:
        yield from tools.requests(tools.spec(), num_batches=4)
        raise KeyboardInterrupt

    reader = Reader(job.fleet(), interrupted(), prefetch_factor=2)
    next(reader)
    with pytest.raises(KeyboardInterrupt):  # with batches still on their way
        next(reader)


def test_reader_wrong_token_is_an_error_at_once(job: Any, tools: Any) -> None:
    from hetero.control.security import Token

    job.pool()
    fleet = job.fleet(token=Token.generate())
    with pytest.raises(AuthenticationError, match="algo-1/0"):
        next(Reader(fleet, iter(tools.requests(tools.spec()))))
    with pytest.raises(AuthenticationError):
        fleet.describe(tools.spec())


@pytest.mark.fault("F31")
def test_reader_of_another_job_is_told_so(job: Any, tools: Any) -> None:
    job.pool()
    fleet = job.fleet(job_id="other", prepare_timeout_s=0.5, data_timeout_s=0.5)
    with pytest.raises(EndpointUnavailableError, match="this server belongs to job test-job"):
        fleet.describe(tools.spec())


@pytest.mark.fault("F2")
def test_sample_that_raises_is_raised_in_its_turn_with_the_remote_traceback(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(raise_at=17))
    turn = next(number for number, request in enumerate(wanted) if 17 in request.indices)
    reader = Reader(fleet, iter(wanted))
    assert len(list(itertools.islice(reader, turn))) == turn
    with pytest.raises(
        DatasetError, match=r"(?s)algo-1/\d in sample at sample 17: ValueError: sample 17 is broken.*__getitem__"
    ):
        next(reader)
    assert fleet.stats.retries == 0


@pytest.mark.attack("A12")
def test_index_out_of_range_names_index_and_length(job: Any, tools: Any) -> None:
    job.pool()
    request = BatchRequest(spec=tools.spec(), indices=np.array([3, 100]), seed=0, epoch=0, position=0)
    with pytest.raises(DatasetError, match="index 100 is out of range: the data set has 100 samples"):
        next(Reader(job.fleet(), iter([request])))


def test_factory_that_raises_is_raised_with_the_remote_traceback(job: Any, tools: Any) -> None:
    job.pool(script_args=("--data", "/nowhere"))
    fleet = job.fleet()
    with pytest.raises(DatasetError, match="RuntimeError: no such directory: --data /nowhere"):
        fleet.describe(tools.spec("unbuildable"))
    assert fleet.describe(tools.spec()).num_samples == 100


@pytest.mark.attack("A12")
def test_unregistered_data_set_names_those_there_are(job: Any, tools: Any) -> None:
    job.pool()
    with pytest.raises(DatasetError, match=r"nombers(?s:.)*numbers"):
        job.fleet().describe(tools.spec("nombers"))


def test_unsendable_batch_names_the_path_and_type(job: Any, tools: Any) -> None:
    job.pool()
    request = BatchRequest(spec=tools.spec("unsendable"), indices=np.array([1]), seed=0, epoch=0, position=0)
    with pytest.raises(DatasetError, match=r"(?s)in encode.*handle.*object"):
        next(Reader(job.fleet(), iter([request])))


@pytest.mark.fault("F24")
def test_batch_over_the_limit_is_an_error_before_anything_is_sent(job: Any, tools: Any) -> None:
    from hetero.wire.limits import Limits

    job.pool()
    fleet = job.fleet(limits=Limits(max_batch_bytes=10_000))
    # 4 samples of 1,000 doubles, and before them 4 indices of 8 bytes.
    message = r"in encode.*batch\['noise'\]: 32000 bytes, but only 9968 are left of the 10000 .*smaller batches"
    with pytest.raises(DatasetError, match=message):
        next(Reader(fleet, iter(tools.requests(tools.spec(width=1000)))))


@pytest.mark.fault("F24")
def test_large_batch_below_the_limit_comes_whole(job: Any, tools: Any, measured: Measured) -> None:
    if psutil.virtual_memory().available < 4 * 2**30:
        pytest.skip("needs 4 GiB of memory")
    job.script.write_text(job.script.read_text() + textwrap.dedent(LARGE_BATCH))
    job.pool()
    request = BatchRequest(spec=tools.spec("large"), indices=np.array([7]), seed=0, epoch=0, position=0)
    fleet = job.fleet()
    fleet.describe(request.spec)
    begin_s = time.monotonic()
    batch = next(Reader(fleet, iter([request])))
    measured("large_batch_s", time.monotonic() - begin_s)
    assert batch.shape == (600 * 2**20,)
    assert (batch[:: 2**20] == np.arange(600) % 251).all()
    assert int(np.count_nonzero(batch)) == np.count_nonzero(np.arange(600) % 251)
    assert (fleet.stats.batches, fleet.stats.retries) == (1, 0)


@pytest.mark.fault("F2")
def test_poisonous_sample_fails_by_name_after_three_deaths(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(kill_at=17))
    turn = next(number for number, request in enumerate(wanted) if 17 in request.indices)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    assert len(list(itertools.islice(reader, turn))) == turn
    with pytest.raises(DatasetError, match=r"died 3 times.*\b17\b"):
        next(reader)
    tools.wait_for(lambda: len(pool.records) == 2)
    assert pool.num_restarts == 3
    # The fleet lives on: the same endpoints serve what is not poisonous.
    with Reader(fleet, iter(tools.requests(tools.spec()))) as healthy:
        assert len(list(healthy)) == 12


@pytest.mark.fault("F2")
def test_sample_that_kills_its_endpoint_once_costs_nothing(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(kill_at=17, kill_flag=str(job.path / "killed")))
    fleet = job.fleet()
    with Reader(fleet, iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.endpoint_losses == 1


def test_reader_waiting_long_says_for_whom_and_again_when_twice_the_time_has_passed(
    job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero.dataplane.reader._LOG_AFTER_S", 0.4)
    reader = Reader(job.fleet(prepare_timeout_s=2.6, data_timeout_s=2.6), iter(tools.requests(tools.spec())))
    with caplog.at_level(logging.WARNING), pytest.raises(EndpointUnavailableError, match="no endpoint has appeared"):
        next(reader)
    said = [record for record in caplog.records if "waiting for batch 0 for" in record.message]
    assert 1 <= len(said) <= 3  # after 0.5, 1 and 2 s: it looks twice a second


def test_reader_with_unusable_bounds_is_refused(job: Any) -> None:
    with pytest.raises(ConfigError, match="prefetch_factor is 0"):
        Reader(job.fleet(), iter([]), prefetch_factor=0)
    with pytest.raises(ConfigError, match="window_bytes is -1"):
        Reader(job.fleet(), iter([]), window_bytes=-1)


@pytest.mark.parametrize(
    ("num_ranks", "memory_gib", "expected"), [("1", 64, 2**30), ("64", 64, 2**28), ("", 2, 2**29), ("-3", 2, 2**29)]
)
def test_window_is_this_ranks_share_of_a_quarter_of_memory_and_at_most_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch, num_ranks: str, memory_gib: int, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory_gib * 2**18}.__getitem__)
    assert default_window_bytes() == expected


def test_fleet_in_a_forked_child_is_refused_and_harmless(job: Any, tools: Any) -> None:
    job.pool()
    fleet = job.fleet()
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


@pytest.mark.fault("F5")
def test_stopped_endpoint_is_overtaken_and_used_again_when_it_goes_on(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = [
        replace(request, position=position, step=position)
        for position, request in enumerate(tools.requests(tools.spec(sample_s=0.002), num_batches=25) * 400)
    ]
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(100)]
    with caplog.at_level(logging.INFO, logger="hetero.dataplane.window"):
        os.kill(pool.pids[0], signal.SIGSTOP)
        try:
            found += [next(reader) for _ in range(100)]
        finally:
            os.kill(pool.pids[0], signal.SIGCONT)
    # Nothing else can have helped: the endpoint was not lost, no call failed or ran out of time.
    assert fleet.stats.hedges_won >= 1
    assert fleet.stats.hedges <= 2 + (len(found) + reader._window.size) / 20
    assert (fleet.stats.retries, fleet.stats.failovers, fleet.stats.endpoint_losses) == (0, 0, 0)
    assert "asking algo-1/1" in caplog.text
    assert all(connection.state is ConnectionState.READY for connection in fleet._used)

    def goes_on() -> bool:
        found.append(next(reader))
        return not fleet.hedging.stragglers._until_s

    tools.wait_for(goes_on)
    assert [batch["index"].tolist() for batch in found] == [
        request.indices.tolist() for request in wanted[: len(found)]
    ]
    assert tools.digest(found[:25]) == tools.digest(tools.local(job.script, wanted[:25]))
