"""Data sets that are built once for all endpoints of a host: who builds them, and what happens if that goes wrong."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.errors import DatasetError
from hetero.reader.reader import Reader
from hetero.spec import DatasetSpec

SCRIPT = """
    import os
    import socket
    import sqlite3
    import threading
    import time

    import numpy as np

    import hetero

    FOLDER = {folder!r}

    def note(what):
        with open(FOLDER + "/" + what, "a") as file:
            print(os.getpid(), os.getppid(), file=file)

    class Rows:
        def __init__(self):
            self.rows = np.arange(100_000)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index] + np.random.randint(100)

    class Database:
        def __init__(self):
            self.connection = sqlite3.connect(":memory:")
            self.connection.execute("create table numbers (number integer)")
            self.connection.executemany("insert into numbers values (?)", [(number,) for number in range(1000)])

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            found = self.connection.execute("select number from numbers where number = ?", (int(index),))
            return found.fetchone()[0]

    class Mapped:
        def __init__(self):
            np.arange(1000).tofile(FOLDER + "/numbers")
            self.file = open(FOLDER + "/numbers", "rb", buffering=0)
            self.head = np.memmap(self.file, int, "r", shape=(4,))

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            self.file.seek(8 * index)
            time.sleep(0.002)
            return int.from_bytes(self.file.read(8), "little")

    def stacked(samples):
        note("samples")
        return np.array(samples)

    @hetero.dataset(collate_fn=stacked, fingerprint="rows")
    def rows(kind="plain", number=0):
        note("builds")
        rows = Rows()
        if kind == "file":
            rows.file = open(FOLDER + "/builds")
        elif kind == "connection":
            rows.connection = socket.socketpair()
        elif kind == "thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        elif kind == "raise":
            raise LookupError("no such column")
        elif kind == "pause":
            while not os.path.exists(FOLDER + "/go"):
                time.sleep(0.01)
        elif kind == "slow":
            time.sleep(600)
        elif kind == "crash" and not os.path.exists(FOLDER + "/crashed"):
            note("crashed")
            os.kill(os.getpid(), 11)
        elif kind == "database":
            return Database()
        elif kind == "mapped":
            return Mapped()
        return rows

    @hetero.dataset(collate_fn=stacked, fingerprint="rows", fork_built=False)
    def own_rows(kind="plain", number=0):
        note("builds")
        return Rows()
"""


def rows(kind: str = "plain", number: int = 0, *, name: str = "rows") -> DatasetSpec:
    return DatasetSpec(name, f'{{"kind":"{kind}","number":{number}}}')


class Host:
    """A host with three endpoints."""

    def __init__(self, job: Any, tools: Any, **options: Any) -> None:
        self.job, self.tools = job, tools
        job.script.write_text(textwrap.dedent(SCRIPT.format(folder=str(job.path))))
        self.pool = job.pool(num_endpoints=3, **options)

    def read(
        self, spec: DatasetSpec, num_batches: int = 60, *, fleet: Any = None, **options: Any
    ) -> list[np.ndarray[Any, Any]]:
        fleet = fleet or self.job.fleet()
        wanted = [
            BatchRequest(spec=spec, work=IndexedWork(np.arange(4) + 4 * number), seed=1, epoch=0, position=number)
            for number in range(num_batches)
        ]
        with Reader(fleet, iter(wanted), **options) as reader:
            return list(reader)

    def read_from_all(self, spec: DatasetSpec, **options: Any) -> list[np.ndarray[Any, Any]]:
        """Read until each endpoint has computed a batch. An endpoint that connects late finds none left."""
        batches: list[np.ndarray[Any, Any]] = []

        def have_all_computed() -> bool:
            batches[:] = self.read(spec, **options)
            return len(self.pool.pids) == 3 and set(self.pool.pids) <= {pid for pid, _ in self.lines("samples")}

        self.tools.wait_for(have_all_computed)
        return batches

    def lines(self, what: str) -> list[tuple[int, int]]:
        """Return process ids and those of the parents, of the processes that noted something."""
        path: Path = self.job.path / what
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(own), int(parent)) for own, parent in map(str.split, lines)]

    @property
    def fork_server(self) -> int:
        """Process id of the fork server."""
        (pid,) = [
            process.pid
            for process in psutil.Process().children(recursive=True)
            if "hetero.pool.fork_server" in process.cmdline() and process.ppid() == os.getpid()
        ]
        return pid

    def check_own_builds(self, spec: DatasetSpec, reason: str) -> None:
        """Expect that each endpoint builds the data set, and that the log says why."""
        batches = self.read(spec)
        assert len(batches) == 60
        self.tools.wait_for(lambda: {pid for pid, _ in self.lines("builds")} >= set(self.pool.pids))
        assert Counter(parent for pid, parent in self.lines("builds") if pid in self.pool.pids) == {self.fork_server: 3}
        self.tools.wait_for(lambda: any(reason in line for line in self.job.lines))


@pytest.fixture
def host(job: Any, tools: Any) -> Host:
    return Host(job, tools)


def test_data_set_is_built_once_and_the_batches_are_the_same(host: Host) -> None:
    batches = host.read_from_all(rows())
    ((builder, parent),) = host.lines("builds")
    assert parent == host.fork_server
    assert {parent for _, parent in host.lines("samples")} == {builder}
    assert {pid for pid, _ in host.lines("samples")} == set(host.pool.pids)
    assert host.pool.num_restarts == 0
    own = host.read(rows(name="own_rows"))
    assert [batch.tolist() for batch in own] == [batch.tolist() for batch in batches]


def test_readers_that_come_at_the_same_time_and_later_find_the_same_endpoints(host: Host) -> None:
    found: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: host.read(rows())})) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(found) == 4
    assert len({str(batches) for batches in found.values()}) == 1
    host.read(rows())
    assert len(host.lines("builds")) == 1
    assert host.pool.num_restarts == 0


def test_shared_memory_is_not_copied(host: Host) -> None:
    host.read(rows())
    pids = [pid for pid, _ in host.lines("samples")]
    (builder,) = [pid for pid, _ in host.lines("builds")]
    for pid in {*pids}:
        assert psutil.Process(pid).memory_full_info().uss < psutil.Process(builder).memory_info().rss


def test_data_set_that_belongs_to_a_thread_can_be_used(host: Host) -> None:
    batches = host.read(rows("database"))
    assert np.concatenate(batches).tolist() == list(range(240))
    assert len(host.lines("builds")) == 1


def test_file_that_is_mapped_may_be_read_by_its_position_too(host: Host) -> None:
    batches = host.read_from_all(rows("mapped"))
    assert np.concatenate(batches).tolist() == list(range(240))
    assert len(host.lines("builds")) == 1


def test_data_sets_of_other_loaders_are_built_before_the_endpoints_are_forked(host: Host) -> None:
    fleet = host.job.fleet()
    for number in range(3):
        fleet.expect(rows(number=number))
    # From all: while the last endpoint is replaced by a fork, the others serve already.
    host.read_from_all(rows(number=1), fleet=fleet)
    pids = set(host.pool.pids)
    host.tools.wait_for(lambda: len(host.lines("builds")) == 3)
    assert len({*host.lines("builds")}) == 1  # one process builds all
    for number in range(3):
        host.read(rows(number=number), fleet=fleet)
    assert set(host.pool.pids) == pids
    assert len(host.lines("builds")) == 3


def test_data_set_that_does_not_survive_a_fork_leaves_the_others_shared(host: Host) -> None:
    fleet = host.job.fleet()
    fleet.expect(rows("file"))
    fleet.expect(rows(number=1))
    host.read_from_all(rows(), fleet=fleet)
    host.read(rows(number=1), fleet=fleet)
    pids = [pid for pid, _ in host.lines("builds")]
    assert len(pids) == 4
    assert pids[0] == pids[1] != pids[2] == pids[3]  # the second builder leaves out the data set with a file
    assert {parent for _, parent in host.lines("samples")} == {pids[3]}
    host.read(rows("file"), fleet=fleet)
    host.tools.wait_for(lambda: len(host.lines("builds")) == 7)
    assert host.pool.num_restarts == 0


def test_endpoint_that_is_suspended_gets_a_successor_too(host: Host) -> None:
    reader = threading.Thread(target=host.read, args=(rows("pause"),))
    reader.start()
    host.tools.wait_for(lambda: host.lines("builds"))
    os.kill(host.pool.pids[0], signal.SIGSTOP)
    (host.job.path / "go").touch()
    reader.join(100)
    assert not reader.is_alive()
    host.tools.wait_for(lambda: len({parent for _, parent in host.lines("samples")}) == 1)
    assert host.pool.num_restarts == 0


def test_endpoints_that_die_and_leave_while_the_data_set_is_built(host: Host) -> None:
    reader = threading.Thread(target=host.read, args=(rows("pause"),))
    reader.start()
    host.tools.wait_for(lambda: host.lines("builds"))
    victim = host.pool.pids[0]
    os.kill(victim, signal.SIGKILL)
    host.tools.wait_for(lambda: len(host.pool.pids) == 3 and victim not in host.pool.pids)
    host.pool.resize(2)
    host.tools.wait_for(lambda: len(host.pool.pids) == 2)
    (host.job.path / "go").touch()
    reader.join(100)
    assert not reader.is_alive()
    ((builder, _),) = host.lines("builds")
    host.tools.wait_for(lambda: {psutil.Process(pid).ppid() for pid in host.pool.pids} == {builder})
    assert len(host.pool.records) == 2
    assert host.pool.num_restarts == 1


def test_successor_has_the_incarnation_of_the_endpoint_and_another_port(host: Host) -> None:
    host.tools.wait_for(lambda: len(host.pool.records) == 3)
    before = host.pool.records
    host.read_from_all(rows())
    assert [record.incarnation for record in host.pool.records] == [record.incarnation for record in before]
    assert not {record.address for record in host.pool.records} & {record.address for record in before}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("file", "because building it opened {folder}/builds"),
        ("connection", "because building it opened a connection"),
        ("thread", "because building it started threads"),
    ],
)
def test_data_set_that_does_not_survive_a_fork_is_built_by_each(host: Host, kind: str, reason: str) -> None:
    host.check_own_builds(rows(kind), reason.format(folder=host.job.path))
    assert len(host.lines("builds")) == 4
    assert host.pool.num_restarts == 0


def test_endpoints_that_need_no_other_process_are_asked_for_none(host: Host) -> None:
    host.read(rows(name="own_rows"))
    host.tools.wait_for(lambda: {pid for pid, _ in host.lines("builds")} == set(host.pool.pids))


def test_single_endpoint_builds_its_data_set(job: Any, tools: Any) -> None:
    host = Host(job, tools)
    host.pool.stop(0.0)
    single = job.pool("algo-2", num_endpoints=1)
    host.read(rows())
    assert [pid for pid, _ in host.lines("builds")] == list(single.pids)


def test_factory_that_raises_is_reported_as_by_one_endpoint(host: Host) -> None:
    with pytest.raises(DatasetError, match="'rows' failed on algo-1/. while it was built: LookupError: no such"):
        host.read(rows("raise"))
    host.read(rows())  # the endpoints serve others


def test_factory_that_ends_the_builder_is_tried_by_the_endpoints(host: Host) -> None:
    host.check_own_builds(rows("crash"), "because the process that builds it killed by SIGSEGV")
    assert host.pool.num_restarts == 0


def test_second_data_set_is_built_by_each_endpoint(host: Host) -> None:
    # From all: while the last endpoint is replaced by a fork, the others serve already.
    host.read_from_all(rows())
    pids = set(host.pool.pids)
    second = host.read(rows(number=2))
    assert len(second) == 60
    host.tools.wait_for(lambda: len(host.lines("builds")) == 4)
    assert set(host.pool.pids) == pids


def test_data_sets_that_are_asked_for_meanwhile_are_built_once_too(host: Host) -> None:
    threads = [threading.Thread(target=host.read, args=(rows(number=number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert 3 <= len(host.lines("builds")) <= 9
    host.read(rows(number=1))


def test_endpoint_that_dies_is_forked_again_with_its_data_set(host: Host) -> None:
    batches = host.read_from_all(rows())
    victim = host.pool.pids[0]
    os.kill(victim, signal.SIGKILL)
    host.tools.wait_for(lambda: len(host.pool.pids) == 3 and victim not in host.pool.pids)
    assert str(host.read(rows())) == str(batches)
    assert len(host.lines("builds")) == 1
    assert host.pool.num_restarts == 1


def test_builder_that_dies_costs_a_restart_of_its_endpoints(host: Host) -> None:
    batches = host.read(rows())
    ((builder, _),) = host.lines("builds")
    before = set(host.pool.pids)
    os.kill(builder, signal.SIGKILL)
    host.tools.wait_for(lambda: len(host.pool.pids) == 3 and not before & set(host.pool.pids))
    assert str(host.read(rows())) == str(batches)
    assert host.pool.num_restarts == 1


def test_fork_server_that_dies_after_the_builder_has_taken_over_ends_all(host: Host) -> None:
    batches = host.read_from_all(rows())
    before = {*host.pool.pids, *(pid for pid, _ in host.lines("builds"))}
    os.kill(host.fork_server, signal.SIGKILL)
    host.tools.wait_for(lambda: not any(map(psutil.pid_exists, before)))
    host.tools.wait_for(lambda: len(host.pool.pids) == 3)
    assert str(host.read(rows())) == str(batches)
    assert host.pool.num_restarts == 1


def test_pool_that_stops_during_a_build_does_not_wait_for_it(host: Host) -> None:
    thread = threading.Thread(target=_read_in_vain, args=(host, rows("slow")), daemon=True)
    thread.start()
    host.tools.wait_for(lambda: len(host.lines("builds")) == 1)
    begin_s = time.monotonic()
    host.pool.stop(5.0)
    assert time.monotonic() - begin_s < 20.0  # it would take 600
    for fleet in host.job.fleets:
        fleet.close()
    thread.join(100)
    assert not thread.is_alive()


def _read_in_vain(host: Host, spec: DatasetSpec) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever a reader whose fleet is closed raises
        host.read(spec)


def test_endpoint_that_is_no_longer_wanted_ends_and_comes_back(host: Host) -> None:
    host.read(rows())
    host.pool.resize(1)
    host.tools.wait_for(lambda: len(host.pool.pids) == 1)
    host.pool.resize(3)
    host.tools.wait_for(lambda: len(host.pool.records) == 3)
    host.read(rows())
    assert len(host.lines("builds")) == 1
    assert host.pool.num_restarts == 0
