"""A host's servers of tf.data.service, against TensorFlow's own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.control.members.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.endpoint.options import EndpointOptions
from hetero.errors import ConfigError, ExitCode
from hetero.pool.tf_pool import ServiceOptions, ServicePool, _Servers
from hetero.wire.channels import without_proxy

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
)

_START_S = 120.0


def wait_for(predicate: Callable[[], object], timeout_s: float = _START_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)


def servers(**options: Any) -> EndpointOptions:
    """Return which servers a host has: one unless stated otherwise."""
    given: dict[str, Any] = {"host": "algo-1", "address": "127.0.0.1", "num_endpoints": 1, "job_id": "job", **options}
    return EndpointOptions(**given)


@contextlib.contextmanager
def running(lines: list[str], **options: Any) -> Iterator[ServicePool]:
    """Yield a pool whose processes are being started."""
    names = ("host", "address", "num_endpoints", "log_level")
    stated = {name: options.pop(name) for name in names if name in options}
    given: dict[str, Any] = {"stable_s": 60.0, **options}
    pool = ServicePool(
        ServiceOptions(endpoint=servers(**stated), **given),
        lambda _: None,
        lambda name, text: lines.append(f"{name}: {text}"),
    )
    with pool:
        yield pool


def is_there(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_names_and_words_tell_dispatcher_from_workers() -> None:
    options = ServiceOptions(endpoint=servers(address="::1", num_endpoints=3), has_dispatcher=True)
    pool = ServicePool(options, lambda _: None)
    assert pool.describe() == "a dispatcher and 2 workers of tf.data.service"
    assert [pool._name_on_host(index) for index in range(3)] == ["tf-dispatcher", "tf-worker-0", "tf-worker-1"]
    assert pool.counters() == {
        "tf.data dispatcher restarts": 0,
        "tf.data worker restarts": 0,
        "stuck endpoints": 0,
    }


def test_without_tensorflow_the_pool_fails_with_one_line(tmp_path: Path) -> None:
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text("raise ModuleNotFoundError('No module', name='tensorflow')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    lines: list[str] = []
    with running(lines, num_endpoints=1, has_dispatcher=True, environment={"PYTHONPATH": path}) as pool:
        wait_for(lambda: pool.failure is not None)
        assert isinstance(pool.failure, ConfigError)
        assert "pip install 'tensorflow>=2.16'" in str(pool.failure)
        assert pool.failure.exit_code is ExitCode.USAGE
    assert not any("Traceback" in line for line in lines)


def test_server_that_still_imports_tensorflow_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    lines: list[str] = []
    with running(lines, num_endpoints=1, has_dispatcher=True, environment={"PYTHONPATH": path}) as pool:
        wait_for(lambda: any("importing" in line for line in lines))
        begun_s = time.monotonic()
        pool.stop(60.0)
        assert time.monotonic() - begun_s < 30.0  # the grace is for work that may be finished
        assert not pool._servers._running


def test_a_folder_for_the_journal_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with running([], num_endpoints=1, has_dispatcher=True, work_dir=str(tmp_path / "file" / "journal")) as pool:
        wait_for(lambda: pool.failure is not None)
        assert "--tf-work-dir" in str(pool.failure)


def test_journal_that_a_killed_launcher_left_is_removed_by_the_next_on_this_machine(tmp_path: Path) -> None:
    elsewhere = tmp_path / "tf-dispatcher-elsewhere-1"
    elsewhere.mkdir(mode=0o700)
    program = (
        "import os; from hetero.endpoint.options import EndpointOptions\n"
        "from hetero.pool.tf_pool import ServiceOptions, _Servers\n"
        "endpoint = EndpointOptions(host='algo-1', address='::1', num_endpoints=1, job_id='job')\n"
        f"servers = _Servers(ServiceOptions(endpoint=endpoint, work_dir={str(tmp_path)!r}, has_dispatcher=True))\n"
        "servers._work_dir(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    left = set(tmp_path.iterdir()) - {elsewhere}
    assert len(left) == 1
    successor = _Servers(ServiceOptions(endpoint=servers(), work_dir=str(tmp_path), has_dispatcher=True))
    try:
        journal = Path(successor._work_dir() or "")
        assert {journal, elsewhere} == set(tmp_path.iterdir())
        assert journal not in left
    finally:
        successor.end()
    assert list(tmp_path.iterdir()) == [elsewhere]


def test_workers_wait_until_they_know_the_dispatcher() -> None:
    with running([], num_endpoints=1) as pool:
        wait_for(lambda: pool._starter is not None)
        time.sleep(1.0)  # nothing is awaited: what is shown is that nothing happens
        assert pool.pids == ()
        assert not pool._servers._running
        assert pool.failure is None


@dataclasses.dataclass
class Service:
    """A host's dispatcher and two workers, and what the pool was before it knew all addresses."""

    pool: ServicePool
    proxy: socket.socket
    """Named by the servers' environment. It listens."""
    journal: Path
    waiting: str
    """How the pool described itself before it knew all addresses."""
    num_started_early: int


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start servers once for the tests below, because each server imports TensorFlow. The last test stops them."""
    addresses = {"algo-1": "127.0.0.1"}
    journal = tmp_path_factory.mktemp("service") / "journal"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        environment = {"http_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}"}
        with running(
            [],
            num_endpoints=3,
            has_dispatcher=True,
            work_dir=str(journal),
            workers={"algo-1": 2, "algo-2": 1},
            address_of=addresses.get,
            environment=environment | without_proxy(environment),
        ) as pool:
            wait_for(lambda: pool._starter is not None)
            time.sleep(1.0)  # nothing is awaited: what is shown is that nothing happens
            waiting, num_started_early = pool.describe(), len(pool._servers._running)
            addresses["algo-2"] = "127.0.0.2"
            assert pool.wait_ready(_START_S)
            yield Service(pool, proxy, journal, waiting, num_started_early)


@needs_tensorflow
def test_dispatcher_waits_for_the_addresses_of_all_workers(service: Service) -> None:
    assert service.num_started_early == 0
    assert "a dispatcher (once the address of algo-2 is known) and 2 workers" in service.waiting
    assert service.pool.describe() == "a dispatcher and 2 workers of tf.data.service"


@needs_tensorflow
def test_servers_reach_each_other_directly_where_a_proxy_is_set(service: Service) -> None:
    with pytest.raises(BlockingIOError):  # it has no connection
        service.proxy.accept()


@needs_tensorflow
def test_workers_go_to_a_dispatcher_that_moved(service: Service, tmp_path: Path) -> None:
    first = service.pool.records[:1]
    with running([], host="algo-2", address="127.0.0.2", num_endpoints=1) as workers:
        workers.follow(first)
        assert workers.wait_ready(_START_S)
        (pid,) = workers.pids
        with running([], num_endpoints=1, has_dispatcher=True, work_dir=str(tmp_path)) as second:
            assert second.wait_ready(_START_S)
            assert second.records[0].incarnation != first[0].incarnation  # it has another journal
            workers.follow(second.records)
            wait_for(lambda: workers.pids not in ((), (pid,)))
            assert workers.counters()["tf.data worker restarts"] == 1


@needs_tensorflow
def test_servers_are_restarted_where_they_were_and_end_in_order(service: Service) -> None:
    pool, journal = service.pool, service.journal
    workers = pool.records[1:]
    assert [record.kind for record in pool.records] == [TF_DISPATCHER, TF_WORKER, TF_WORKER]
    assert [record.endpoint_id for record in workers] == ["algo-1/tf-worker-0", "algo-1/tf-worker-1"]
    assert all(is_there(record.address) for record in pool.records)
    before = {record.endpoint_id: record.address for record in pool.records}
    incarnations = {record.incarnation for record in pool.records}
    pids = pool.pids
    for pid in pids[:2]:  # the dispatcher and a worker
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(pool.records) == 3 and not set(pids[:2]) & set(pool.pids))
    assert {record.endpoint_id: record.address for record in pool.records} == before
    # To ranks the dispatcher is the one that they know: it has read what its predecessor wrote.
    assert [record.incarnation in incarnations for record in pool.records] == [True, False, True]
    assert pool.counters() == {
        "tf.data dispatcher restarts": 1,
        "tf.data worker restarts": 1,
        "stuck endpoints": 0,
    }
    assert len(list(journal.iterdir())) == 1  # its successor reads what it wrote
    pids = pool.pids
    pool.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(is_there(address) for address in before.values())
    assert list(journal.iterdir()) == []


def test_a_record_of_another_kind_is_no_dispatcher() -> None:
    pool = ServicePool(ServiceOptions(endpoint=servers(host="algo-2")), lambda _: None)
    pool.follow([EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:1", incarnation="a")])
    assert pool._servers.dispatcher == ""
