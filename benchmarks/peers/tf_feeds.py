"""Ways to feed a TensorFlow trainer with photographs, each with two threads or processes that preprocess.

Their configuration: ``root``, the folder of the photographs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from feeds import photo_arrays, served
from harness import Competitor

import hetero.tf
from hetero.control.members.directory import Directory, EndpointRecord
from peers import NUM_PROCESSES, tf_service, tf_service_rank, touch
from peers.tf_data_service import make_jpeg

_SHUFFLED = 512
"""Samples: under dynamic sharding a worker asks the dispatcher for so many, one by one, before its first batch."""
_THREADS = dict.fromkeys(("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")
"""Environment of workers: each is one preprocessing process."""
_STOP_S = 12.0


class _TfFeed(Competitor):
    """Takes the batches of a `tf.data.Dataset` as NumPy arrays over TensorFlow's memory."""

    min_warmup_s = 1.0
    dataset: Any
    """The endless batches. `start` makes them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        import tensorflow as tf  # a trainer has imported it before it makes a dataset

        self.tf = tf
        self.root: str = config["root"]

    def batches(self) -> Iterator[Any]:
        """Yield from a new iterator."""
        yield from self.dataset.as_numpy_iterator()

    def consume(self, batch: Any) -> tuple[int, int]:
        """Touch it."""
        return photo_arrays.BATCH_SIZE, touch(batch)

    def pipeline(self, num_threads: int) -> Any:
        """Return the pipeline in TensorFlow's operators, for so many threads wherever it runs."""
        options = self.tf.data.Options()
        options.threading.private_threadpool_size = num_threads
        options.autotune.enabled = False
        parallel = num_threads if num_threads > 1 else None
        made = make_jpeg(self.root, num_shuffled=_SHUFFLED, num_parallel_calls=parallel)
        return made.repeat().prefetch(2).with_options(options)


class TfLocal(_TfFeed):
    """tf.data in the trainer process, in two threads."""

    def start(self) -> None:
        self.dataset = self.pipeline(NUM_PROCESSES)


class TfByHand(_TfFeed):
    """tf.data service, started by hand: a dispatcher, and two workers of one thread each."""

    pauses = True

    def start(self) -> None:
        self._service = tf_service.Service(NUM_PROCESSES, threads=1)
        service = self.tf.data.experimental.service
        by_hand = service.distribute(service.ShardingPolicy.DYNAMIC, self._service.url, compression=None)
        self.dataset = self.pipeline(1).apply(by_hand)

    def stop(self) -> None:
        self._service.stop()


class TfLauncher(_TfFeed):
    """tf.data service, started by the launchers of a simulated job of two data hosts, and `hetero.tf.distribute`."""

    pauses = True

    def start(self) -> None:
        self._exits = contextlib.ExitStack()
        scratch = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        folder = Path(self._exits.enter_context(scratch))
        fifo = folder / "stay"
        os.mkfifo(fifo)
        self._exits.callback(self._wait)
        self._exits.callback(os.close, os.open(fifo, os.O_RDWR))  # for writing alone it would block until read
        command = [
            *(sys.executable, "-m", "hetero.cli", "simulate", "--output-dir", str(folder / "run")),
            *("--group", f"data_group=ml.c5.9xlarge:{NUM_PROCESSES}", "--group", "dnn_group=ml.p3.2xlarge:1"),
            *("--data-service", "tf", "--tf-workers-per-host", "1", "--nproc-per-node", "1"),
            *(tf_service_rank.__file__, "--", str(NUM_PROCESSES), str(fifo)),
        ]
        self._job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **_THREADS}
        )
        _TfSession(self._read_servers()).enter()
        self.dataset = hetero.tf.distribute(self.pipeline(1), sharding="dynamic", compression=None)

    def stop(self) -> None:
        self._exits.close()

    def _read_servers(self) -> list[dict[str, Any]]:
        assert self._job.stdout is not None
        output = []
        for line in self._job.stdout:
            output.append(line)
            _, mark, records = line.partition(tf_service_rank.MARK)
            if mark:
                # Read on, because launchers would block in a print if the pipe were full.
                threading.Thread(target=self._job.stdout.read, daemon=True).start()
                return list(json.loads(records))
        raise harness.ProcessFailedError(f"the job ended with {self._job.wait()}:\n{''.join(output[-20:])}")

    def _wait(self) -> None:
        try:
            self._job.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._job.terminate()


class FromDataset(_TfFeed):
    """`hetero.tf.from_dataset`: two endpoints of a real pool, the pipeline in Python."""

    def start(self) -> None:
        self._exits = contextlib.ExitStack()
        options = {"script": photo_arrays.__file__, "num_endpoints": NUM_PROCESSES}
        served.Session(self._exits.enter_context(harness.server("endpoints", options)).ask()).enter()
        self.dataset = hetero.tf.from_dataset(
            photo_arrays.photo_arrays(self.root), batch_size=photo_arrays.BATCH_SIZE, shuffle=True
        )

    def stop(self) -> None:
        self._exits.close()


class _TfSession(served.Session):
    """What a rank of a job with tf.data service learns from its launcher."""

    remote = False
    generation = 0

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.options = dataclasses.replace(self.options, data_service="tf")
        self.tf_servers = Directory(EndpointRecord(**record) for record in records)
