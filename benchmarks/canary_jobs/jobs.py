"""The jobs: script, arguments, data, and how the canaries get a part of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from canary_jobs.data import binary_files, csv_files, float_files, jpeg_files, text_files, uneven_files

__all__ = ["JOBS", "PAIRS", "Job", "Pair"]

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job."""

    name: str
    about: str
    script: str
    args: tuple[str, ...] = ()
    """Arguments. ``{fraction}`` and ``{samples}`` are placeholders of canaries."""
    whole_samples: int | None = None
    """Samples of the whole, for ``{samples}``. The short form scales them."""
    make: Callable[[Path, float], None] | None = None
    """Makes the files. None for jobs that generate their data."""
    dataset: str = ""
    """Name of the data, which jobs may share."""
    by_samples: bool = False
    scaled: str = ""
    """Argument whose number the short form scales."""
    refused: bool = False
    """Whether a forecast must be refused, because no line can hold."""
    limit_mib: int | None = None
    """Memory of the machine, if the whole job runs out of it."""
    groups: tuple[str, ...] = ("trainer=ml.m5.large:1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two clusters for the same job."""

    name: str
    job: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    prices: tuple[str, ...]


_CSV = {"make": csv_files(100, 36_000, 21), "dataset": "csv"}
_FLOATS = {"make": float_files(100, 3000, 101), "dataset": "floats"}

JOBS: tuple[Job, ...] = (
    Job(
        name="gbt-csv",
        about="gradient-boosted trees on 100 CSV files (the source's third experiment in small)",
        script="train_gbt.py",
        **_CSV,
    ),
    Job(
        name="bert",
        about="a small BERT from its configuration (the source's second experiment)",
        script="train_bert.py",
        args=("--sentences", "16000"),
        scaled="--sentences",
        by_samples=True,
    ),
    Job(
        name="resnet-jpeg",
        about="a small ResNet on JPEG files, with validation",
        script="train_resnet.py",
        make=jpeg_files(5_000, 64),
        dataset="jpeg",
    ),
    Job(
        name="logistic",
        about="logistic regression, 250 passes over arrays in files",
        script="train_logistic.py",
        args=("--passes", "250"),
        **_FLOATS,
    ),
    Job(
        name="tokenise",
        about="tokenising text files",
        script="tokenise.py",
        make=text_files(120, 9000),
        dataset="text",
    ),
    Job(
        name="input-bound",
        about="costly samples, a small network",
        script="train_net.py",
        args=("--images", "26000", "--sample-work", "40", "--workers", "1"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="compute-bound",
        about="cheap samples, a wide network",
        script="train_net.py",
        args=("--images", "26000", "--width", "1024"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="two-hosts",
        about="the same network on two ranks on two hosts",
        script="train_net.py",
        args=("--images", "24000", "--width", "512", "--sample-work", "8"),
        scaled="--images",
        by_samples=True,
        groups=("trainer=ml.m5.large:2",),
    ),
    Job(
        name="many-passes",
        about="eight short passes with loader workers",
        script="train_net.py",
        args=("--images", "6000", "--width", "256", "--sample-work", "10", "--workers", "1", "--passes", "8"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="growing-memory",
        about="keeps the features of all files in memory",
        script="collect_features.py",
        args=("--copies", "8"),
        **_FLOATS,
    ),
    Job(
        name="out-of-memory",
        about="the same on a machine with too little memory",
        script="collect_features.py",
        args=("--copies", "8", "--limit-mib", "900"),
        limit_mib=1400,
        **_FLOATS,
    ),
    Job(
        name="forest",
        about="a random forest, n log n",
        script="grow_forest.py",
        args=("--fraction", "{fraction}", "--whole-rows", "260000"),
        scaled="--whole-rows",
    ),
    Job(
        name="join",
        about="joins and aggregates tables in memory",
        script="join_tables.py",
        args=("--samples", "{samples}", "--rounds", "18"),
        whole_samples=4_000_000,
    ),
    Job(
        name="cold-cache",
        about="reads files from storage, twelve passes",
        script="scan_files.py",
        args=("--passes", "12"),
        make=binary_files(100, 24_000_000),
        dataset="binary",
    ),
    Job(
        name="quadratic",
        about="distances of all pairs",
        script="distances.py",
        args=("--samples", "{samples}"),
        whole_samples=25_000,
        refused=True,
    ),
    Job(
        name="early-stop",
        about="ends if the loss no longer falls",
        script="train_net.py",
        args=("--images", "20000", "--width", "256", "--passes", "40", "--patience", "2"),
        scaled="--images",
        by_samples=True,
        refused=True,
    ),
    Job(
        name="fixed-steps",
        about="ends after 1,500 steps, whatever the data",
        script="train_net.py",
        args=("--images", "20000", "--width", "256", "--max-steps", "1500"),
        by_samples=True,
        refused=True,
    ),
    Job(
        name="short-passes",
        about="eight loader workers make all batches of a canary's pass at the same time",
        script="train_net.py",
        args=("--images", "3000", "--sample-work", "400", "--workers", "8", "--passes", "2"),
        by_samples=True,
        refused=True,
    ),
    Job(
        name="evaluation",
        about="evaluates every 250 steps, which 3 % never reach",
        script="train_net.py",
        args=("--images", "24000", "--width", "512", "--evaluate-every", "250"),
        by_samples=True,
        refused=True,
    ),
    Job(
        name="uneven-files",
        about="the work per file varies widely",
        script="uneven_files.py",
        make=uneven_files(150, 1_000_000),
        dataset="uneven",
        refused=True,
    ),
)

PAIRS: tuple[Pair, ...] = (
    Pair(
        name="compute on one or two hosts",
        job="compute-bound",
        first=("trainer=ml.m5.large:1",),
        second=("trainer=ml.m5.xlarge:2",),
        prices=("ml.m5.large=1", "ml.m5.xlarge=0.5"),
    ),
    Pair(
        name="input on one or two hosts",
        job="input-bound",
        first=("trainer=ml.m5.large:1",),
        second=("trainer=ml.m5.xlarge:2",),
        prices=("ml.m5.large=1", "ml.m5.xlarge=0.7"),
    ),
    Pair(
        name="tokenising on one or two hosts",
        job="tokenise",
        first=("trainer=ml.m5.large:1",),
        second=("trainer=ml.m5.xlarge:2",),
        prices=("ml.m5.large=1", "ml.m5.xlarge=0.6"),
    ),
)
