"""How fast are the rows of shards, beside the reader that each format's users have?

Question: how many rows per second does one process read from Parquet, tar and JSON Lines files? In order, as the other
readers do, and shuffled in windows.

Method: files of 64 MB in the page cache. Rows of text have 1 kB, samples in tar have an image of 100 kB. All give
Python objects: dictionaries of texts and numbers, or of bytes. The other reader is pyarrow's ``iter_batches`` for
Parquet, webdataset (a package of `make bench-env`) for tar, and gzip with json for JSON Lines.

    python benchmarks/bench_shards.py --only "hetero, windows"
"""

from __future__ import annotations

import gzip
import io
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

BATCH_SIZE = 64
BOUND = 0.95
NUM_FILES = 4
TEXT_ROWS = 16_000
IMAGE_ROWS = 640
FOLDER_VARIABLE = "BENCH_SHARDS_FOLDER"

COLUMNS = harness.columns("samples_per_s", "gb_per_s", "trainer_peak_bytes", "first_batch_s")


class _Rows(Competitor):
    """Batches are lists of rows."""

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
        make = {"parquet": shards.parquet, "tar": shards.tar, "jsonl.gz": shards.jsonl}[self.config["ending"]]
        index = Path(os.environ[FOLDER_VARIABLE], f"{self.config['ending']}.npz")
        self._rows = make(self.files(), index=index if index.exists() else None, scratch=os.environ[FOLDER_VARIABLE])
        self._epoch = 0

    def rows(self) -> Iterator[Any]:
        """Yield the rows of one pass."""
        places = np.arange(len(self._rows))
        order: Any = (places,)
        if self.config["shuffle"]:
            windows = WindowOrder(self._rows.layout, seed=0, epoch=self._epoch)
            begins = range(0, len(places), BATCH_SIZE)
            order = (windows.draw(places[begin : begin + BATCH_SIZE])[0] for begin in begins)
        self._epoch += 1
        for indices in order:
            for begin in range(0, len(indices), BATCH_SIZE):
                yield from self._rows.__getitems__(indices[begin : begin + BATCH_SIZE].tolist())


class Local(_Rows):
    """The reader that the format's users have."""

    def rows(self) -> Iterator[Any]:
        """Yield the rows of one pass."""
        return _LOCAL[self.config["ending"]](self.files())


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


_LOCAL = {"parquet": _read_parquet, "tar": _read_tar, "jsonl.gz": _read_jsonl}
COMPETITORS = {"hetero": Hetero, "hetero, windows": Hetero, "local reader": Local}


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
            config={"ending": ending, "shuffle": name == "hetero, windows"},
            start_s=2.0,
            warmup_s=1.0,
        )
        for ending in _LOCAL
        for name in COMPETITORS
    ]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether hetero is as fast as the format's reader."""
    ending = rows[0].trial.group
    return [
        harness.target(
            f"{ending}: samples/s of {name} x local reader",
            harness.ratio(rows, name, "local reader", "samples_per_s"),
            BOUND,
        )
        for name in ("hetero", "hetero, windows")
    ]


def write_files(folder: Path) -> None:
    """Write the files of each format, and the indexes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draws = random.Random(1)
    words = [f"{draws.getrandbits(32):x}" for _ in range(5000)]
    for number in range(NUM_FILES):
        rows = [
            {"id": number * TEXT_ROWS + place, "text": " ".join(draws.choices(words, k=120)), "score": draws.random()}
            for place in range(TEXT_ROWS)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"text-{number}.parquet", row_group_size=TEXT_ROWS // 4)
        with gzip.open(folder / f"text-{number}.jsonl.gz", "wt", compresslevel=3) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        with tarfile.open(folder / f"images-{number}.tar", "w") as archive:
            for place in range(IMAGE_ROWS):
                for name, content in (("jpg", draws.randbytes(100_000)), ("cls", str(place).encode())):
                    member = tarfile.TarInfo(f"{number:03d}{place:06d}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    for ending in ("jsonl.gz", "tar"):
        files = sorted(map(str, folder.glob(f"*.{ending}")))
        folder_index = folder / f"{ending}.npz"
        assert cli.main(["index", *files, "--output", str(folder_index)]) == 0


if __name__ == "__main__":
    harness.dispatch(COMPETITORS)
    sys.exit(main())
