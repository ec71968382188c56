"""The jobs: script, arguments, data, and how the canaries get a part of the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
    make: partial[None] | None = None
    """Maker of `canary_jobs.data` with its numbers. None for jobs that generate their data."""
    by_samples: bool = False
    scaled: str = ""
    """Argument whose number the short form scales."""
    refused_by: tuple[str, ...] = ()
    """Rules. One of them must refuse the time, because no line can hold. Empty for jobs that a line can forecast."""
    groups: tuple[str, ...] = ("trainer=ml.m5.large:1",)

    @property
    def limit_mib(self) -> int | None:
        """Memory that the script may use, and that its host has for the forecast. None without a limit.

        The whole must need more for its data alone. Its host needs still more: the launcher and the libraries.
        """
        return int(self.args[self.args.index("--limit-mib") + 1]) if "--limit-mib" in self.args else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two clusters for the same job."""

    name: str
    job: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    prices: tuple[str, ...]


_CSV = partial(csv_files, number=100, rows=36_000, columns=21)
_FLOATS = partial(float_files, number=100, rows=6000, columns=101)

JOBS: tuple[Job, ...] = (
    Job(
        name="gbt-csv",
        about="gradient-boosted trees on 100 CSV files (the source's third experiment in small)",
        script="train_gbt.py",
        make=_CSV,
    ),
    Job(
        name="bert",
        about="a small BERT from its configuration (the source's second experiment)",
        script="train_bert.py",
        args=("--sentences", "32000"),
        scaled="--sentences",
        by_samples=True,
    ),
    Job(
        name="resnet-jpeg",
        about="a small ResNet on JPEG files, with validation",
        script="train_resnet.py",
        make=partial(jpeg_files, number=12_000, side=64),
    ),
    Job(
        name="logistic",
        about="logistic regression, 250 passes over arrays in files",
        script="train_logistic.py",
        args=("--passes", "250"),
        make=_FLOATS,
    ),
    Job(
        name="tokenise",
        about="tokenising text files",
        script="tokenise.py",
        make=partial(text_files, number=120, lines=18_000),
    ),
    Job(
        name="input-bound",
        about="costly samples, a small network",
        script="train_net.py",
        args=("--images", "52000", "--sample-work", "40", "--workers", "1"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="compute-bound",
        about="cheap samples, a wide network",
        script="train_net.py",
        args=("--images", "104000", "--width", "1024"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="two-hosts",
        about="the same network on two ranks on two hosts",
        script="train_net.py",
        args=("--images", "40000", "--width", "512", "--sample-work", "8"),
        scaled="--images",
        by_samples=True,
        groups=("trainer=ml.m5.large:2",),
    ),
    Job(
        name="many-passes",
        about="eight short passes with loader workers",
        script="train_net.py",
        args=("--images", "12000", "--width", "256", "--sample-work", "10", "--workers", "1", "--passes", "8"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="growing-memory",
        about="keeps the features of all files in memory",
        script="collect_features.py",
        args=("--copies", "8"),
        make=_FLOATS,
    ),
    Job(
        name="out-of-memory",
        about="the same on a machine with too little memory",
        script="collect_features.py",
        args=("--copies", "8", "--limit-mib", "3400"),
        make=_FLOATS,
    ),
    Job(
        name="forest",
        about="a random forest, n log n",
        script="grow_forest.py",
        args=("--fraction", "{fraction}", "--whole-rows", "400000"),
        scaled="--whole-rows",
    ),
    Job(
        name="join",
        about="joins and aggregates tables in memory",
        script="join_tables.py",
        args=("--samples", "{samples}", "--rounds", "18"),
        whole_samples=8_000_000,
    ),
    Job(
        name="cold-cache",
        about="reads files from storage, 36 passes",
        script="scan_files.py",
        args=("--passes", "36"),
        make=partial(binary_files, number=100, num_bytes=24_000_000),
    ),
    Job(
        name="quadratic",
        about="distances of all pairs",
        script="distances.py",
        args=("--samples", "{samples}"),
        whole_samples=25_000,
        refused_by=("curved", "no-growth"),
    ),
    Job(
        name="early-stop",
        about="ends if the loss no longer falls, which no rule sees",
        script="train_net.py",
        args=("--images", "20000", "--width", "256", "--passes", "40", "--patience", "2"),
        scaled="--images",
        by_samples=True,
    ),
    Job(
        name="fixed-steps",
        about="ends after 6,000 steps, whatever the data",
        script="train_net.py",
        args=("--images", "20000", "--width", "256", "--max-steps", "6000"),
        by_samples=True,
        refused_by=("fixed-steps", "no-growth", "passes"),
    ),
    Job(
        name="short-passes",
        about="eight loader workers make all batches of a canary's pass at the same time",
        script="train_net.py",
        args=("--images", "3000", "--sample-work", "400", "--workers", "8", "--passes", "2"),
        by_samples=True,
        refused_by=("short-passes",),
    ),
    Job(
        name="evaluation",
        about="evaluates every 250 steps, which 3 % never reach and no rule sees",
        script="train_net.py",
        args=("--images", "48000", "--width", "512", "--evaluate-every", "250"),
        by_samples=True,
    ),
    Job(
        name="uneven-files",
        about="the work per file varies widely",
        script="uneven_files.py",
        make=partial(uneven_files, number=150, values=1_000_000),
        refused_by=("noise", "no-growth"),
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
