"""Fixtures with endpoints: a small script, pools that serve it, fleets that read. Deliveries and links alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.batches.fetch import fetch
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.control.security import Token, write_token
from hetero.endpoint.delivery import Delivery
from hetero.endpoint.link import EndpointLink, SentFetch
from hetero.endpoint.options import EndpointOptions
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.fleet import Fleet
from hetero.spec import DatasetSpec
from hetero.wire.limits import Limits
from hetero.wire.transports.interface import Transport
from tests.support.batch_path.calls import Asked
from tests.support.batch_path.deliveries import TCP, echo, num_descriptors, num_threads
from tests.support.batch_path.services import Endpoint
from tests.support.batch_path.staging import Stage
from tests.support.waiting import wait_for

JOB = "test-job"

SCRIPT = '''
    """Serves small arrays; arguments make it misbehave."""
    import os
    import random
    import sys
    import time

    import numpy as np

    import hetero

    def together(samples):
        return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}

    class Numbers:
        def __init__(self, length, raise_at, kill_at, kill_flag, sample_s, width, hold_at=-1, hold_flag=""):
            self.length, self.raise_at, self.kill_at = length, raise_at, kill_at
            self.kill_flag, self.sample_s, self.width = kill_flag, sample_s, width
            self.hold_at, self.hold_flag = hold_at, hold_flag

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            if index >= self.length:
                raise IndexError("no such sample")
            if index == self.raise_at:
                raise ValueError(f"sample {index} is broken")
            if index == self.kill_at and (not self.kill_flag or not os.path.exists(self.kill_flag)):
                if self.kill_flag:
                    open(self.kill_flag, "w").close()
                os.kill(os.getpid(), 9)
            while index == self.hold_at and os.path.exists(self.hold_flag):
                open(self.hold_flag + "-reached", "w").close()
                time.sleep(0.01)
            time.sleep(self.sample_s)
            noise = np.random.random(self.width) + random.random()
            return {"index": np.int64(index), "noise": noise}

    @hetero.dataset(collate_fn=together, fingerprint=lambda data: f"numbers-{data.length}")
    def numbers(
        length=100, raise_at=-1, kill_at=-1, kill_flag="", sample_s=0.0, width=8, hold_at=-1, hold_flag=""
    ):
        return Numbers(length, raise_at, kill_at, kill_flag, sample_s, width, hold_at, hold_flag)

    @hetero.dataset(collate_fn=together)
    def unbuildable():
        raise RuntimeError("no such directory: " + " ".join(sys.argv[1:]))

    shared = np.zeros(1_000_000, dtype=np.int64)

    def refill(samples):
        shared[:] = samples[0]["index"]
        return shared

    @hetero.dataset(collate_fn=refill, fingerprint="reusing")
    def reusing():
        return Numbers(100, -1, -1, "", 0.0, 1)

    @hetero.dataset(collate_fn=lambda samples: {"handle": object()})
    def unsendable():
        return Numbers(10, -1, -1, "", 0.0, 1)

    class Kept:
        def __init__(self, folder, load_s, raise_at, kill_at):
            self.folder, self.load_s, self.raise_at, self.kill_at = folder, load_s, raise_at, kill_at

        def __len__(self):
            return 100

        def load(self, index):
            if index == self.raise_at:
                raise ValueError(f"sample {index} is broken")
            if index == self.kill_at and not os.path.exists(self.folder + "-killed"):
                open(self.folder + "-killed", "w").close()
                os.kill(os.getpid(), 9)
            with open(f"{self.folder}/{os.getpid()}", "a") as file:
                file.write(f"{index}\\n")
            time.sleep(self.load_s)
            return np.int64(index)

        def augment(self, sample):
            return {"index": sample, "noise": np.random.random(8) + random.random()}

    @hetero.dataset(collate_fn=together, fingerprint="kept", cache="1 MB")
    def kept(folder, load_s=0.0, raise_at=-1, kill_at=-1):
        return Kept(folder, load_s, raise_at, kill_at)

    if __name__ == "__main__":
        raise SystemExit("the main block must not run on endpoints")
'''


class Job:
    """Pools on simulated hosts, one directory for all, fleets to read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path / "train.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.token = Token.generate()
        self.token_path = path / "token"
        write_token(str(self.token_path), self.token)
        self.directory = Directory()
        self.pools: list[EndpointPool] = []
        self.fleets: list[Fleet] = []
        self.lines: list[str] = []
        self._records: dict[str, tuple[EndpointRecord, ...]] = {}
        self._lock = threading.Lock()

    def pool(self, host: str = "algo-1", *, ready: bool = True, **options: Any) -> EndpointPool:
        own = {field.name for field in dataclasses.fields(PoolOptions)} & options.keys()
        settings = {"token_path": str(self.token_path), **{name: options.pop(name) for name in own}}
        given = {"script": str(self.script), "num_endpoints": 1, "address": "127.0.0.1", "job_id": JOB, **options}
        pool = EndpointPool(
            PoolOptions(endpoint=EndpointOptions(host=host, **given), **settings),
            functools.partial(self.publish, host),
            lambda name, text: self.lines.append(f"{name}: {text}"),
        )
        self.pools.append(pool)
        pool.start()
        if ready:
            assert pool.wait_ready(300.0), self.lines
        return pool

    def publish(self, host: str, records: tuple[EndpointRecord, ...]) -> None:
        with self._lock:
            self._records[host] = records
            served = [entry for entries in self._records.values() for entry in entries]
            self.directory.replace(served, hosts=self._records)  # the end of an endpoint is not its host's

    def fleet(self, **options: Any) -> Fleet:
        fleet = Fleet(
            self.directory,
            options.pop("token", self.token),
            **{"job_id": JOB, "prepare_timeout_s": 60.0, "data_timeout_s": 60.0, **options},
        )
        self.fleets.append(fleet)
        return fleet

    def stop(self) -> None:
        self.disconnect()
        for pool in self.pools:
            pool.stop(0.0)

    def disconnect(self) -> None:
        for fleet in self.fleets:
            fleet.close()
        self.fleets.clear()


class SharedJob(Job):
    """A job of several tests: a pool stays for the next test that asks for the same one.

    The directory has the pools that the present test has asked for.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._started: dict[str, EndpointPool] = {}
        self._present: dict[str, EndpointPool] = {}

    def pool(self, host: str = "algo-1", **options: Any) -> EndpointPool:
        key = f"{host} {sorted(options.items())}"
        if key not in self._started:
            self._started[key] = super().pool(host, **options)
        self._present[host] = pool = self._started[key]
        super().publish(host, pool.records)
        return pool

    def publish(self, host: str, records: tuple[EndpointRecord, ...]) -> None:
        """Publish the records unless they are of a pool of an earlier test."""
        present = self._present.get(host)
        if present is not None and present.records == records:
            super().publish(host, records)

    def forget(self) -> None:
        """End what belongs to one test."""
        self.disconnect()
        self._present.clear()
        self._records.clear()
        self.directory = Directory()
        self.lines.clear()
        assert [pool.num_restarts for pool in self.pools] == [0] * len(self.pools), "not a test for a shared job"


@contextlib.contextmanager
def _stopped_afterwards(job: Job) -> Iterator[None]:
    """Stop the job in the end. None of its processes may be left."""
    threads = threading.active_count()
    yield
    job.stop()
    assert _processes_of(str(job.script)) == []
    wait_for(lambda: threading.active_count() <= threads)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job without endpoints yet."""
    job = Job(tmp_path)
    with _stopped_afterwards(job):
        yield job


@pytest.fixture(scope="module")
def job_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedJob]:
    """The job behind `shared_job`."""
    job = SharedJob(tmp_path_factory.mktemp("job"))
    with _stopped_afterwards(job):
        yield job


@pytest.fixture
def shared_job(job_of_module: SharedJob) -> Iterator[SharedJob]:
    """A job whose endpoints other tests of the module use too. Tests that end or stop endpoints take `job`."""
    yield job_of_module
    job_of_module.forget()


def _processes_of(script: str) -> list[str]:
    """Return processes that serve this script. Its token path is in their environment."""
    token = str(Path(script).parent / "token").encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if b"hetero.pool" in command and token in (process / "environ").read_bytes():
                found.append(f"{process.name}: {command!r}")
        except OSError:
            continue
    return found


def spec(name: str = "numbers", **arguments: Any) -> DatasetSpec:
    """Return the specification that calling the script's factory would give."""
    import json

    given = {"length": 100, "raise_at": -1, "kill_at": -1, "kill_flag": "", "sample_s": 0.0, "width": 8}
    given = {**given, **arguments} if name == "numbers" else arguments
    return DatasetSpec(name, json.dumps(given, sort_keys=True, separators=(",", ":")))


def requests(wanted: DatasetSpec, num_batches: int = 12, batch_size: int = 4, seed: int = 3) -> list[BatchRequest]:
    """Return shuffled batches over a data set."""
    order = np.random.default_rng(seed).permutation(num_batches * batch_size).astype(np.int64) % 100
    return [
        BatchRequest(
            spec=wanted,
            work=IndexedWork(order[position * batch_size : (position + 1) * batch_size]),
            seed=seed,
            epoch=1,
            position=position,
            step=position,
        )
        for position in range(num_batches)
    ]


@pytest.fixture
def tools() -> Any:
    """The functions above."""

    class Tools:
        pass

    tools = Tools()
    tools.spec, tools.requests, tools.wait_for = spec, requests, wait_for  # type: ignore[attr-defined]
    tools.local, tools.digest = local, digest  # type: ignore[attr-defined]
    return tools


def local(path: Path, wanted: list[BatchRequest]) -> list[Any]:
    """Compute batches in this process, from the same script."""
    import importlib.util
    import sys

    from hetero.batches.seeds import preserved_generators
    from hetero.datasets import build, registered

    if "numbers" not in registered():
        module_spec = importlib.util.spec_from_file_location("dataplane_test_script", path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules["dataplane_test_script"] = module
        module_spec.loader.exec_module(module)
    with preserved_generators():
        built = build(wanted[0].spec)
        return [fetch(built, request) for request in wanted]


def digest(batches: list[dict[str, Any]]) -> list[bytes]:
    """Return the bytes of batches, for comparison."""
    return [b"".join(key.encode() + np.asarray(batch[key]).tobytes() for key in sorted(batch)) for batch in batches]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What readers ask of endpoints, in order and with the time."""
    found: list[Asked] = []
    ask, begin, receive = EndpointConnection.fetch, EndpointConnection.begin, SentFetch.receive
    entries: weakref.WeakKeyDictionary[SentFetch[Fetched], Asked] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def unless_answered(entry: Asked) -> Iterator[None]:
        try:
            yield
        except BaseException:
            entry.is_answered = False
            raise

    def noting(connection: EndpointConnection, request: BatchRequest, **options: Any) -> Fetched:
        found.append(entry := Asked(time.monotonic(), connection.identity, request.position))
        with unless_answered(entry):
            fetched = ask(connection, request, **options)
        entry.is_answered = True
        return fetched

    def noting_sent(connection: EndpointConnection, request: BatchRequest, **options: Any) -> SentFetch[Fetched] | None:
        sent = begin(connection, request, **options)
        if sent is not None:
            found.append(entry := Asked(time.monotonic(), connection.identity, request.position))
            entries[sent] = entry
        return sent

    def noting_received(sent: SentFetch[Fetched]) -> Fetched | None:
        with unless_answered(entries[sent]):
            fetched = receive(sent)
        if fetched is not None:
            entries[sent].is_answered = True
        return fetched

    monkeypatch.setattr(EndpointConnection, "fetch", noting)
    monkeypatch.setattr(EndpointConnection, "begin", noting_sent)
    monkeypatch.setattr(SentFetch, "receive", noting_received)
    return found


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tools: Any) -> Iterator[Stage]:
    stage = Stage(monkeypatch, tools)
    yield stage
    for fleet in stage.fleets:
        fleet.close()
    stage.tools.wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("hetero-fetcher")])


@pytest.fixture
def serve(tools: Any) -> Iterator[Callable[..., Delivery]]:
    """Start deliveries. Afterwards their threads and descriptors have to be gone."""
    gc.collect()
    descriptors = num_descriptors()
    served: list[Delivery] = []

    def serve(
        answer: Any = echo, *, max_requests: int = 8, address: str = "127.0.0.1", transport: Transport = TCP
    ) -> Delivery:
        served.append(Delivery(address, answer, max_requests=max_requests, transport=transport))
        served[-1].start()
        return served[-1]

    yield serve
    for each in served:
        each.stop(0.0)
    tools.wait_for(lambda: num_threads() == 0)
    tools.wait_for(lambda: num_descriptors() <= descriptors)


@pytest.fixture
def streams() -> Iterator[contextlib.ExitStack]:
    """Closes connections."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def start_endpoint(tools: Any) -> Iterator[Callable[..., Endpoint]]:
    """Start endpoints in this process. Afterwards threads and descriptors have to be what they were."""
    gc.collect()
    threads, descriptors = threading.active_count(), num_descriptors()
    endpoints: list[Endpoint] = []

    def start_endpoint(*answer: Any, **options: Any) -> Endpoint:
        endpoints.append(Endpoint(*answer, **options))
        return endpoints[-1]

    yield start_endpoint
    for endpoint in endpoints:
        endpoint.stop()
    endpoints.clear()
    tools.wait_for(lambda: threading.active_count() <= threads)
    gc.collect()
    tools.wait_for(lambda: num_descriptors() <= descriptors + 8)  # gRPC keeps its pollers


@pytest.fixture
def link_to() -> Iterator[Callable[..., EndpointLink]]:
    """Link to endpoints, and close the links afterwards."""
    with contextlib.ExitStack() as stack:

        def link_to(record: EndpointRecord, transport: Transport | None = None) -> EndpointLink:
            link = EndpointLink(record, (), Limits(), transport=transport)
            return stack.enter_context(contextlib.closing(link))

        yield link_to
