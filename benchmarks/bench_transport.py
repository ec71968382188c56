"""Does a batch from another process cost what the transport under it must cost, and how do peers compare?

Question: how many ready-made batches per second reach one trainer process, from one to four endpoints, and how
much CPU do both sides spend on a gigabyte?

Method: nothing is preprocessed; every batch is the same prepared array, copied and sent anew. All processes are on this
machine (loopback or shared memory). The trainer process reads one byte of every page and drops the batch.

    raw-tcp           length-prefixed bytes over a socket, recv_into one buffer: the ceiling of loopback
    grpc-raw          identity serializers, one endless stream of 2 MiB frames, copied into one buffer: the ceiling
                      of gRPC from Python
    grpc-raw-malloc   the same, with glibc's mmap and trim thresholds raised in both processes
    hetero            endpoints of a real pool, a real reader: framing, checksums, order, window
    grpc-protobuf     one protobuf message with a bytes field per batch
    tf.data-service   dispatcher and workers, ready-made tensors, uncompressed
    torch             torch.utils.data.DataLoader, a worker process per endpoint, shared memory

    python benchmarks/bench_transport.py --short
    python benchmarks/bench_transport.py --sizes 10000 10000000 --endpoints 1 2
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import served
from harness import Column, Competitor, Trial

SIZES = (10_000, 1_000_000, 10_000_000, 40_000_000)
SHORT_SIZES = (10_000, 10_000_000)
FRAME_BYTES = 2 * 2**20
SCRIPT = str(Path(__file__).with_name("ready_batches.py"))
RAISED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}

COLUMNS = (
    Column(title="batches/s", metric="batches_per_s", form="{:,.1f}"),
    Column(title="GB/s", metric="gb_per_s"),
    Column(title="trainer CPU-s/GB", metric="trainer_cpu_s_per_gb"),
    Column(title="supply CPU-s/GB", metric="supply_cpu_s_per_gb"),
    Column(title="trainer peak MB", metric="trainer_peak_bytes", form="{:,.0f}", scale=1e-6),
    Column(title="growth MB", metric="trainer_growth_bytes", form="{:,.0f}", scale=1e-6),
    Column(title="first batch s", metric="first_batch_s"),
)


class _Transport(Competitor):
    """What they share: one server process per endpoint, one thread per endpoint where there are several."""

    server = ""

    def start(self) -> None:
        self._children = [
            harness.Child(__file__, "server", self.server, self.config) for _ in range(self.config["num_endpoints"])
        ]
        self._facts = [child.ask() for child in self._children]

    def batches(self) -> Iterator[Any]:
        return _merge([functools.partial(self.receive, facts) for facts in self._facts])

    def receive(self, facts: Any) -> Iterator[Any]:
        """Yield batches of one server."""
        raise NotImplementedError

    def consume(self, batch: Any) -> tuple[int, int]:
        return 1, _look_at(batch, self.config["nbytes"])

    def stop(self) -> None:
        for child in self._children:
            child.stop(2.0)


def _look_at(batch: Any, nbytes: int) -> int:
    """Check length, first and last byte, and touch every page: what is mapped but never read costs nothing."""
    if len(batch) != nbytes or int(batch[0]) != 0 or int(batch[-1]) != (nbytes - 1) % 256 or batch[::4096].any():
        raise ValueError(f"a batch of {len(batch)} bytes is not the one of {nbytes} that was sent")
    return nbytes


def _merge(sources: Sequence[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
    """Yield what comes from any source; each runs in a thread of its own if there are several."""
    if len(sources) == 1:
        yield from sources[0]()
        return
    ready: queue.Queue[Any] = queue.Queue(2)

    def run(source: Callable[[], Iterator[Any]]) -> None:
        for batch in source():
            ready.put(batch)

    for source in sources:
        threading.Thread(target=run, args=(source,), daemon=True).start()
    while True:
        yield ready.get()


class RawTcp(_Transport):
    server = "raw-tcp"

    def receive(self, facts: Any) -> Iterator[Any]:
        nbytes = self.config["nbytes"]
        buffer = np.empty(nbytes, np.uint8)
        view, prefix = buffer.data, bytearray(8)
        with socket.create_connection(("127.0.0.1", facts["port"])) as connection:
            while True:
                connection.recv_into(prefix, 8, socket.MSG_WAITALL)
                received = 0
                while received < struct.unpack("<Q", prefix)[0]:
                    received += connection.recv_into(view[received:])
                yield buffer


class GrpcRaw(_Transport):
    server = "grpc-raw"

    def receive(self, facts: Any) -> Iterator[Any]:
        import grpc

        nbytes = self.config["nbytes"]
        buffer = np.empty(nbytes, np.uint8)
        view, filled = buffer.data, 0
        options = [("grpc.max_receive_message_length", -1), ("SingleThreadedUnaryStream", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{facts['port']}", options=options) as channel:
            for frame in channel.unary_stream("/probe/Read", None, None)(b""):
                view[filled : filled + len(frame)] = frame
                filled += len(frame)
                if filled == nbytes:
                    yield buffer
                    filled = 0


class GrpcProtobuf(_Transport):
    server = "grpc-protobuf"

    def receive(self, facts: Any) -> Iterator[Any]:
        import grpc

        from hetero.wire.proto import data_pb2

        options = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{facts['port']}", options=options) as channel:
            for message in channel.unary_stream("/probe/Read", None, data_pb2.Frame.FromString)(b""):
                yield np.frombuffer(message.payload, np.uint8)


class Hetero(Competitor):
    def start(self) -> None:
        self._pool = harness.Child(
            __file__, "server", "endpoints", {"script": SCRIPT, "num_endpoints": self.config["num_endpoints"]}
        )
        self._fleet = served.fleet(self._pool.ask())

    def batches(self) -> Iterator[Any]:
        import ready_batches

        from hetero.batches.request import BatchRequest
        from hetero.dataplane.reader import Reader

        spec = ready_batches.ready_batches(self.config["nbytes"])
        requests = (
            BatchRequest(spec=spec, indices=np.array([step]), seed=0, epoch=0, position=step, collate=False, step=step)
            for step in itertools.count()
        )
        self._reader = Reader(self._fleet, requests, prefetch_factor=self.config.get("prefetch_factor", 2))
        yield from self._reader

    def consume(self, batch: Any) -> tuple[int, int]:
        return 1, _look_at(batch, self.config["nbytes"])

    def stop(self) -> None:
        self._reader.close()
        self._fleet.close()
        self._pool.stop()


class Torch(Competitor):
    def start(self) -> None:
        import torch
        from ready_batches import ReadyBatches

        self._loader: Any = torch.utils.data.DataLoader(
            ReadyBatches(self.config["nbytes"]),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=self.config["num_endpoints"],
            multiprocessing_context=self.config.get("context", "fork"),
        )

    def batches(self) -> Iterator[Any]:
        yield from self._loader

    def consume(self, batch: Any) -> tuple[int, int]:
        return 1, _look_at(batch, self.config["nbytes"])

    def stop(self) -> None:
        del self._loader


class TfDataService(Competitor):
    def start(self) -> None:
        dispatcher = harness.Child(__file__, "server", "tf-dispatcher", {})
        address = dispatcher.ask()["address"]
        workers = [
            harness.Child(__file__, "server", "tf-worker", {"dispatcher": address})
            for _ in range(self.config["num_endpoints"])
        ]
        for worker in workers:
            worker.ask()
        self._children = [*workers, dispatcher]
        self._address = address

    def batches(self) -> Iterator[Any]:
        import tensorflow as tf

        nbytes = self.config["nbytes"]
        ready = tf.constant(np.arange(nbytes, dtype=np.uint8))
        dataset = tf.data.Dataset.from_tensors(ready).repeat()
        dataset = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode="parallel_epochs", service=f"grpc://{self._address}", compression=None
            )
        )
        yield from dataset.as_numpy_iterator()

    def consume(self, batch: Any) -> tuple[int, int]:
        return 1, _look_at(batch, self.config["nbytes"])

    def stop(self) -> None:
        for child in self._children:
            child.stop(2.0)


# Servers


@contextlib.contextmanager
def serve_tcp(config: Mapping[str, Any]) -> Iterator[Any]:
    batch = np.arange(config["nbytes"], dtype=np.uint8)
    prefix = struct.pack("<Q", len(batch))

    def run() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(prefix)
                connection.sendall(batch.data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=run, daemon=True).start()
        yield {"port": listener.getsockname()[1]}


@contextlib.contextmanager
def _serve_stream(read: Callable[[], Iterator[Any]], serialize: Callable[[Any], bytes] | None) -> Iterator[Any]:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    handlers = {"Read": grpc.unary_stream_rpc_method_handler(lambda _request, _context: read(), None, serialize)}
    server = grpc.server(
        ThreadPoolExecutor(2),
        handlers=[grpc.method_handlers_generic_handler("probe", handlers)],
        options=[("grpc.max_send_message_length", -1)],
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield {"port": port}
    server.stop(0)


def serve_grpc_raw(config: Mapping[str, Any]) -> Any:
    batch = np.arange(config["nbytes"], dtype=np.uint8).tobytes()
    frames = [batch[begin : begin + FRAME_BYTES] for begin in range(0, len(batch), FRAME_BYTES)]
    return _serve_stream(lambda: itertools.cycle(frames), None)


def serve_grpc_protobuf(config: Mapping[str, Any]) -> Any:
    from hetero.wire.proto import data_pb2

    batch = np.arange(config["nbytes"], dtype=np.uint8)

    def read() -> Iterator[Any]:
        while True:
            yield data_pb2.Frame(payload=batch.tobytes())

    return _serve_stream(read, data_pb2.Frame.SerializeToString)


@contextlib.contextmanager
def serve_tf_dispatcher(_config: Mapping[str, Any]) -> Iterator[Any]:
    import tensorflow as tf

    server = tf.data.experimental.service.DispatchServer()
    yield {"address": server.target.split("://")[1]}
    server.stop()


@contextlib.contextmanager
def serve_tf_worker(config: Mapping[str, Any]) -> Iterator[Any]:
    import tensorflow as tf

    server = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(dispatcher_address=config["dispatcher"], heartbeat_interval_ms=1000)
    )
    yield {}
    server.stop()


COMPETITORS: Mapping[str, Callable[[Mapping[str, Any]], Competitor]] = {
    "hetero": Hetero,
    "raw-tcp": RawTcp,
    "grpc-raw": GrpcRaw,
    "grpc-raw-malloc": GrpcRaw,
    "grpc-protobuf": GrpcProtobuf,
    "tf.data-service": TfDataService,
    "torch": Torch,
}
SERVERS = {
    "endpoints": served.endpoints,
    "raw-tcp": serve_tcp,
    "grpc-raw": serve_grpc_raw,
    "grpc-protobuf": serve_grpc_protobuf,
    "tf-dispatcher": serve_tf_dispatcher,
    "tf-worker": serve_tf_worker,
}


def main() -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes per batch")
    parser.add_argument("--endpoints", type=int, nargs="+", help="numbers of endpoints")
    args = parser.parse_args()
    sizes = args.sizes or (SHORT_SIZES if args.short else SIZES)
    endpoints = args.endpoints or ((1,) if args.short else (1, 2, 4))
    trials = [
        Trial(
            competitor=name,
            group=f"{nbytes:,} bytes, {count} endpoint{'s' * (count > 1)}",
            config={"nbytes": nbytes, "num_endpoints": count},
            environment=RAISED_MALLOC if name == "grpc-raw-malloc" else {},
        )
        for count in endpoints
        for nbytes in sizes
        for name in args.only or COMPETITORS
    ]
    seconds = args.seconds or (1.0 if args.short else 3.0)
    rows = harness.compare(__file__, trials, runs=args.runs, seconds=seconds, warmup_batches=24, fresh=not args.short)
    text = "# Transport of ready-made batches\n\n" + "\n\n".join(
        f"## {group}\n\n{harness.table(members, COLUMNS, ratio_metric='batches_per_s', reference='hetero')}\n\n"
        + "\n".join(targets(members))
        for group in dict.fromkeys(row.trial.group for row in rows)
        for members in [[row for row in rows if row.trial.group == group]]
    )
    print(text)
    harness.write("transport", rows, text, harness.results_folder(args), runs=args.runs, seconds=seconds)
    return 0


def targets(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether the figures of this group are met; they are for one endpoint."""
    config = rows[0].trial.config
    if config["num_endpoints"] != 1:
        return []
    if config["nbytes"] == 10_000:
        return [harness.target("batches/s over torch", harness.ratio(rows, "hetero", "torch", "batches_per_s"), 0.7)]
    if config["nbytes"] < 10_000_000:
        return []
    own = next((row for row in rows if row.trial.competitor == "hetero" and row.runs), None)
    cpu = own.median("trainer_cpu_s_per_gb") if own else float("nan")
    return [
        harness.target("GB/s over grpc-raw", harness.ratio(rows, "hetero", "grpc-raw", "gb_per_s"), 0.9),
        harness.target("GB/s over tf.data-service", harness.ratio(rows, "hetero", "tf.data-service", "gb_per_s"), 1.8),
        harness.target("trainer CPU-s per GB", cpu, 0.45, at_most=True),
    ]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, SERVERS)
    sys.exit(main())
