"""Hostile requests of holders of the token, and hostile data sets."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.control.security import call_metadata
from hetero.endpoint.link import EndpointLink
from hetero.errors import DatasetError
from hetero.reader.reader import Reader
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import MAX_FETCH_BYTES, PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.requests import spec_to_proto
from hetero.wire.transports.interface import Connection
from tests.support.batch_path import deliveries

pytestmark = pytest.mark.integration

JOB = "test-job"
GOOD = pb.FetchRequest(indices=np.array([1]).tobytes()).SerializeToString()

CONTENT = '''
    """Content that is the user's own business, up to a size."""
    import numpy as np

    import hetero

    class Content:
        def __init__(self, kind):
            self.kind = kind

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {
                "list": lambda: list(range(4))[index],
                "nan": lambda: np.full(3, np.nan),
                "line": lambda: "[a b c] INFO hetero_metric x=0\\n\\x1b[31m",
                "string": lambda: "x" * 3_000_000,
                "gigabytes": lambda: np.broadcast_to(np.zeros(1), (2**28,)),
                "key": lambda: {"k" * 5000: 1},
                "deep": lambda: [[[[[[[[[[[[1]]]]]]]]]]]],
                "leaves": lambda: [np.zeros(1)] * 5000,
                "object": lambda: object(),
            }[self.kind]()

    @hetero.dataset(collate_fn=lambda samples: samples[0], fingerprint=lambda data: data.kind)
    def content(kind):
        return Content(kind)
'''


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """The script above as a file."""
    script = tmp_path / "content.py"
    script.write_text(textwrap.dedent(CONTENT))
    return script


@contextlib.contextmanager
def connected(job: Any, address: Any) -> Iterator[Connection]:
    """Open a connection for batches as a reader does."""
    link = EndpointLink(address, call_metadata(job.token, JOB, incarnation=address.incarnation), Limits())
    with contextlib.closing(link):
        link.attend()
        ((_, stream),) = link._idle
        yield stream


def ask(stream: Connection, message: pb.FetchRequest) -> Any:
    """Send a request. Return the batch, or raise the exception in the answer."""
    return deliveries.ask(stream, message.SerializeToString())


def wanted(job: Any, spec: Any) -> pb.FetchRequest:
    job.fleet().describe(spec)  # has it built
    return pb.FetchRequest(protocol=PROTOCOL, dataset=spec_to_proto(spec), collate=True)


@pytest.mark.attack("A12")
def test_index_outside_of_the_data_set_is_an_error_that_names_it(job: Any, tools: Any, content: Path) -> None:
    pool = job.pool(script=str(content))
    message = wanted(job, tools.spec("content", kind="list"))
    outside: list[dict[str, Any]] = [
        {"indices": np.array([4]).tobytes()},
        {"indices": np.array([-5]).tobytes()},
        {"indices": np.array([2**62]).tobytes()},
        {"indices": np.array([-(2**63)]).tobytes()},
        {"indices": np.array([1, 2, 3, 100]).tobytes()},
        {"keys": pb.Children(items=[pb.Node(text="../../etc/passwd")]).SerializeToString()},
        {"keys": pb.Children(items=[pb.Node(text="\x1b[31m\n")]).SerializeToString()},
        {"keys": pb.Children(items=[pb.Node(tuple=pb.Children(items=[pb.Node(integer=1)] * 2))]).SerializeToString()},
    ]
    with connected(job, pool.records[0]) as stream:
        for fields in outside:
            asking = pb.FetchRequest(**fields)
            asking.MergeFrom(message)
            with pytest.raises(DatasetError) as caught:
                ask(stream, asking)
            assert caught.value.record.stage == "sample"
            assert caught.value.record.sample_index.isprintable()
            assert "\x1b" not in str(caught.value)
            assert ask(stream, pb.FetchRequest.FromString(message.SerializeToString() + GOOD)) == 1
    assert pool.num_restarts == 0


@pytest.mark.attack("A8")
@pytest.mark.attack("A12")
def test_request_for_what_there_is_not_is_refused_before_any_work(job: Any, tools: Any) -> None:
    pool = job.pool()
    good = wanted(job, tools.spec())
    before = dict(pool.statistics())
    unregistered = pb.DatasetSpec(name="os.system", arguments_json="{}")
    foreign = pb.DatasetSpec(name="numbers", arguments_json='{"length":100,"raise_at":-1}')
    refused: list[tuple[dict[str, Any], Fault]] = [
        ({"dataset": unregistered, "indices": np.array([1]).tobytes()}, Fault.UNPREPARED),
        ({"dataset": foreign, "indices": np.array([1]).tobytes()}, Fault.UNPREPARED),
        ({"dataset": pb.DatasetSpec(name="../../x"), "indices": np.array([1]).tobytes()}, Fault.MALFORMED),
        ({"indices": bytes(8 * (2**20 + 1))}, Fault.MALFORMED),
        ({"indices": np.array([1]).tobytes(), "compression": 99}, Fault.MALFORMED),
        ({"indices": np.array([1]).tobytes(), "occurrences": np.ones(1000, np.uint32).tobytes()}, Fault.MALFORMED),
    ]
    with connected(job, pool.records[0]) as stream:
        for fields, expected in refused:
            message = pb.FetchRequest(protocol=PROTOCOL, collate=True, dataset=good.dataset)
            message.MergeFrom(pb.FetchRequest(**fields))
            with pytest.raises(CallFailedError) as caught:
                ask(stream, message)
            assert caught.value.fault is expected, (fields, caught.value.details)
        # 10^7 indices are 80 MB: the length alone ends it, nothing of it is read or kept.
        stream.send_raw((80 * 10**6).to_bytes(4, "little"))
        answer = stream.receive_message(2**21)
        assert answer is not None
        with pytest.raises(CallFailedError, match=f"at most {MAX_FETCH_BYTES}") as caught:
            BatchDecoder().take_message(answer)
        assert caught.value.fault is Fault.MALFORMED
    assert pool.statistics().get("num_batches", 0) == before.get("num_batches", 0)
    with Reader(job.fleet(), iter(tools.requests(tools.spec(), num_batches=3))) as reader:
        assert len(list(reader)) == 3


@pytest.mark.attack("A20")
def test_content_of_a_data_set_travels_as_it_is_within_the_limits(job: Any, tools: Any, content: Path) -> None:
    job.pool(script=str(content))

    def first(kind: str) -> Any:
        request = tools.requests(tools.spec("content", kind=kind), num_batches=1, batch_size=1)
        with Reader(job.fleet(), iter(request)) as reader:
            return next(iter(reader))

    assert np.isnan(first("nan")).all()
    assert first("line") == "[a b c] INFO hetero_metric x=0\n\x1b[31m"
    assert first("string") == "x" * 3_000_000
    for kind, message in (
        ("gigabytes", "2147483648 bytes, but only 1073741824 are left"),
        ("key", "5000|256"),
        ("deep", "levels|nest"),
        ("leaves", "1024"),
        ("object", "cannot be sent"),
    ):
        with pytest.raises(DatasetError, match=message) as caught:
            first(kind)
        assert caught.value.record.stage == "encode"
