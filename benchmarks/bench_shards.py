"""How fast are the rows of shards, beside the reader that each format's users have?

Question: how many rows per second does one process read from Parquet, tar, JSON Lines and MDS files? In order, and
shuffled: hetero in windows of 64 MiB, the other readers in a buffer of 10,000 rows (of 500 images).

Method: files of 64 MB in the page cache. Rows of text have 1 kB, samples in tar have an image of 100 kB. All give
Python objects: dictionaries of texts and numbers, or of bytes. The other reader is pyarrow's ``iter_batches`` for
Parquet, webdataset (a package of `make bench-env`) for tar, gzip with json for JSON Lines, and mosaicml-streaming for
MDS. Without mosaicml-streaming and litdata, MDS is left out. malloc keeps freed memory in all processes, as in each
process of a job.

    python benchmarks/bench_shards.py --only "hetero, windows"
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import itertools
import json
import os
import random
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Competitor, Trial

from hetero import cli, shards
from hetero.plans.windows import WindowOrder
from hetero.system.memory import keep_freed_memory

BATCH_SIZE = 64
BUFFER_ROWS = {"parquet": 10_000, "tar": 500, "jsonl.gz": 10_000, "mds": 10_000}
BOUND = 0.95
NUM_FILES = 4
TEXT_ROWS = 16_000
IMAGE_ROWS = 640
FOLDER_VARIABLE = "BENCH_SHARDS_FOLDER"

COLUMNS = harness.columns("samples_per_s", "gb_per_s", "trainer_peak_bytes", "first_batch_s")


class _Rows(Competitor):
    """Batches are lists of rows."""

    def start(self) -> None:
        """Set malloc as hetero's endpoints and ranks do."""
        keep_freed_memory()

    def files(self) -> list[str]:
        """Return the files of the format."""
        return sorted(map(str, Path(os.environ[FOLDER_VARIABLE]).glob(f"*.{self.config['ending']}")))

    def rows(self) -> Iterator[Any]:
        """Yield the rows of one pass."""
        raise NotImplementedError

    def batches(self) -> Iterator[list[Any]]:
        """Yield batches of pass after pass."""
        batch = []
        while True:
            for row in self.rows():
                batch.append(row)
                if len(batch) == BATCH_SIZE:
                    yield batch
                    batch = []

    def consume(self, batch: Any) -> tuple[int, int]:
        """Count it. A row has a text or the bytes of an image."""
        return len(batch), sum(len(row.get("text") or row.get("jpg")) for row in batch)


class Hetero(_Rows):
    """`hetero.shards`, in the order of the files or in windows."""

    def start(self) -> None:
        """Build the data set."""
        super().start()
        folder = os.environ[FOLDER_VARIABLE]
        if self.config["ending"] == "mds":
            self._rows = shards.mds(Path(folder, "mds"))
        else:
            make = {"parquet": shards.parquet, "tar": shards.tar, "jsonl.gz": shards.jsonl}[self.config["ending"]]
            index = Path(folder, f"{self.config['ending']}.npz")
            self._rows = make(self.files(), index=index if index.exists() else None, scratch=folder)
        self._epoch = 0

    def rows(self) -> Iterator[Any]:
        """Yield the rows of one pass."""
        indices = np.arange(len(self._rows))
        if self.config["shuffle"]:
            # All at once, because in a job the trainer draws the order.
            indices, _ = WindowOrder(self._rows.layout, seed=0, epoch=self._epoch).draw(indices)
        self._epoch += 1
        for begin in range(0, len(indices), BATCH_SIZE):
            yield from self._rows.__getitems__(indices[begin : begin + BATCH_SIZE].tolist())


class Local(_Rows):
    """The reader that the format's users have, in the order of the files or with a buffer."""

    def rows(self) -> Iterator[Any]:
        """Yield the rows of one pass."""
        rows = _LOCAL[self.config["ending"]](self.files())
        return _in_buffer(rows, BUFFER_ROWS[self.config["ending"]]) if self.config["shuffle"] else rows


def _in_buffer(rows: Iterator[Any], num_rows: int) -> Iterator[Any]:
    """Yield the rows in the order of a shuffle buffer, as webdataset and Hugging Face's data sets have it."""
    draw = random.Random(0).random
    buffer = list(itertools.islice(rows, num_rows))
    for row in rows:
        place = int(draw() * num_rows)
        yield buffer[place]
        buffer[place] = row
    random.shuffle(buffer)
    yield from buffer


def _read_parquet(files: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for path in files:
        for batch in pq.ParquetFile(path, memory_map=True).iter_batches(BATCH_SIZE, use_threads=False):
            yield from batch.to_pylist()


def _read_tar(files: Sequence[str]) -> Iterator[Any]:
    import webdataset

    yield from webdataset.WebDataset(files, shardshuffle=False, empty_check=False)


def _read_jsonl(files: Sequence[str]) -> Iterator[Any]:
    for path in files:
        with gzip.open(path) as lines:
            for line in lines:
                yield json.loads(line)


def _read_mds(files: Sequence[str]) -> Iterator[Any]:
    import streaming

    folder = str(Path(os.environ[FOLDER_VARIABLE], "mds"))
    yield from streaming.StreamingDataset(local=folder, shuffle=False, batch_size=BATCH_SIZE)


_LOCAL = {"parquet": _read_parquet, "tar": _read_tar, "jsonl.gz": _read_jsonl}
if importlib.util.find_spec("streaming") and importlib.util.find_spec("litdata"):
    _LOCAL["mds"] = _read_mds
COMPETITORS = {"hetero": Hetero, "local reader": Local, "hetero, windows": Hetero, "local reader, buffer": Local}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=5.0, short_seconds=2.0)
    args = parser.parse_args(argv)
    plan = harness.plan("shards", parser, args)
    with tempfile.TemporaryDirectory(prefix="bench-shards-") as folder:
        os.environ[FOLDER_VARIABLE] = folder  # not in the configuration, which is published
        if not args.estimate:
            write_files(Path(folder))
        rows = plan.compare(__file__, make_trials(), warmup_batches=20)
    plan.write(rows, harness.report("Rows of shards", rows, COLUMNS, figures, ratio_metric="samples_per_s"))
    return 0


def make_trials() -> list[Trial]:
    """Return the rows to measure."""
    return [
        Trial(
            competitor=name,
            group=ending,
            config={"ending": ending, "shuffle": "," in name},
            start_s=2.0,
            warmup_s=1.0,
        )
        for ending in _LOCAL
        for name in COMPETITORS
    ]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether hetero is as fast as the format's reader."""
    ending = rows[0].trial.group
    pairs = (("hetero", "local reader"), ("hetero, windows", "local reader, buffer"))
    return [
        harness.target(
            f"{ending}: samples/s of {ours} x {theirs}", harness.ratio(rows, ours, theirs, "samples_per_s"), BOUND
        )
        for ours, theirs in (*pairs, ("hetero, windows", "local reader"))
    ]


def write_files(folder: Path) -> None:
    """Write the files of each format, and the indexes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draws = random.Random(1)
    words = [f"{draws.getrandbits(32):x}" for _ in range(5000)]
    all_rows = []
    for number in range(NUM_FILES):
        rows = [
            {"id": number * TEXT_ROWS + place, "text": " ".join(draws.choices(words, k=120)), "score": draws.random()}
            for place in range(TEXT_ROWS)
        ]
        all_rows += rows
        pq.write_table(pa.Table.from_pylist(rows), folder / f"text-{number}.parquet", row_group_size=TEXT_ROWS // 4)
        with gzip.open(folder / f"text-{number}.jsonl.gz", "wt", compresslevel=3) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        with tarfile.open(folder / f"images-{number}.tar", "w") as archive:
            for place in range(IMAGE_ROWS):
                for name, content in (("jpg", draws.randbytes(100_000)), ("cls", str(place).encode())):
                    member = tarfile.TarInfo(f"{number:03d}{place:06d}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    if "mds" in _LOCAL:
        from streaming import MDSWriter

        columns = {"id": "int", "text": "str", "score": "float64"}
        with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit="16mb") as writer:
            for row in all_rows:
                writer.write(row)
    for ending in ("jsonl.gz", "tar"):
        files = sorted(map(str, folder.glob(f"*.{ending}")))
        folder_index = folder / f"{ending}.npz"
        assert cli.main(["index", *files, "--output", str(folder_index)]) == 0


if __name__ == "__main__":
    harness.dispatch(COMPETITORS)
    sys.exit(main())
