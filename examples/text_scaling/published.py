"""The source's published figures, computed anew. Prints its Table 3 as it is and as it follows from times and prices.

    python examples/text_scaling/published.py

The source is "Describing the trade-offs between training time, cost, and model performance for HuggingFace distributed
training on Amazon SageMaker" (Stuart and Bellavara Diwakar, AWS). Its runs are in studies/source.yaml. README.md lists
what is wrong in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys

HOURLY_USD = {"ml.p3.2xlarge": 3.825, "ml.p3.8xlarge": 14.688, "ml.p3.16xlarge": 28.152}
"""USD per hour of one instance, from the source's Figure 3."""
LEARNING_RATE = 5e-5
NUM_PARAMETERS = 66_955_010
"""Parameters of distilbert-base-uncased with a head of two classes."""
NUM_ENCODER_PARAMETERS = 66_362_880
"""Parameters of distilbert-base-uncased without the head. The two head layers have 590,592 and 1,538."""
F1_ON_ONE_GPU, F1_KEPT, F1_SQRT = 0.931, 0.897, 0.924
"""Validation F1 with 100,000 samples: on 1 GPU, and on 32 with the learning rate kept and with the square-root rule."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of Table 3: one cluster."""

    gpus: int
    """GPUs of all hosts together."""
    instance_type: str
    hosts: int
    mean_s: float
    """Mean training time in seconds, printed in whole minutes."""
    deviation_s: float
    """Standard deviation of the training time in seconds."""
    runs: int
    """Number of runs."""
    saved_s: float | None = None
    """Time saved, compared with the column before, in seconds."""
    added_usd: float | None = None
    """Cost added, compared with the column before, in USD. Negative where the cost is lower."""

    @property
    def hourly_usd(self) -> float:
        """Price of all hosts together in USD per hour."""
        return self.hosts * HOURLY_USD[self.instance_type]

    def usd(self, seconds: float | None = None) -> float:
        """Return the cost of a run in USD. ``seconds`` replaces the mean time."""
        return (self.mean_s if seconds is None else seconds) / 3600 * self.hourly_usd


def seconds(hours: float = 0, minutes: float = 0, remainder: float = 0) -> float:
    """Return a time in seconds."""
    return 3600 * hours + 60 * minutes + remainder


ONE, FOUR, EIGHT, SIXTEEN, THIRTY_TWO = TABLE_3 = (
    Column(
        gpus=1, instance_type="ml.p3.2xlarge", hosts=1, mean_s=seconds(18, 17), deviation_s=seconds(0, 6, 30), runs=5
    ),
    Column(
        gpus=4,
        instance_type="ml.p3.8xlarge",
        hosts=1,
        mean_s=seconds(5, 20),
        deviation_s=seconds(0, 4, 3),
        runs=3,
        saved_s=seconds(12, 57),
        added_usd=8.44,
    ),
    Column(
        gpus=8,
        instance_type="ml.p3.16xlarge",
        hosts=1,
        mean_s=seconds(3, 41),
        deviation_s=seconds(0, 42, 58),
        runs=3,
        saved_s=seconds(1, 39),
        added_usd=25.54,
    ),
    Column(
        gpus=16,
        instance_type="ml.p3.16xlarge",
        hosts=2,
        mean_s=seconds(16, 24),
        deviation_s=seconds(0, 4, 4),
        runs=4,
        saved_s=seconds(2, 18),
        added_usd=-25.47,
    ),
    Column(
        gpus=32,
        instance_type="ml.p3.16xlarge",
        hosts=4,
        mean_s=seconds(0, 53),
        deviation_s=seconds(0, 1, 15),
        runs=6,
        saved_s=seconds(0, 30, 50),
        added_usd=20.57,
    ),
)
"""Table 3 as it is printed."""


def deduced_times_s() -> list[float]:
    """Return the five mean times in seconds that follow from Table 3's differences as they are printed.

    The printed means are rounded to minutes, and one of them is wrong. The cost differences are rounded to cents, and
    the last of the time differences to seconds. These are five equations for five times. Between 16 and 32 GPUs, with
    the price p of a host in USD per second, 4 p (t16 - saved) - 2 p t16 = added. The other times follow from the cost
    differences. The rounding leaves ranges of 53, 14, 6, 3 and 2 seconds for the times, from 1 to 32 GPUs (README.md).
    """
    host_usd_per_s = HOURLY_USD["ml.p3.16xlarge"] / 3600
    assert THIRTY_TWO.saved_s is not None
    assert THIRTY_TWO.added_usd is not None
    sixteen_s = (THIRTY_TWO.added_usd / host_usd_per_s + 4 * THIRTY_TWO.saved_s) / 2
    times = [sixteen_s, sixteen_s - THIRTY_TWO.saved_s]
    for before, after in reversed(list(itertools.pairwise(TABLE_3[:4]))):
        assert after.added_usd is not None
        times.insert(0, (after.usd(times[0]) - after.added_usd) / before.hourly_usd * 3600)
    return times


def without_flawed_run_s() -> float:
    """Return the time of 8 GPUs at a global batch of 256, in seconds, without the run that had 128.

    Assumes that the two others took the same time t. Then the mean is (2 t + u) / 3 and the deviation, over n - 1, is
    (u - t) / sqrt(3). The four minutes by which equal runs of the other clusters differ change the result by about
    seven seconds.
    """
    return deduced_times_s()[2] - EIGHT.deviation_s / math.sqrt(3)


def duration_text(duration_s: float) -> str:
    """Return a time as hours, minutes and seconds."""
    minutes, remainder = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m {remainder:02} s"


def table() -> str:
    """Return Table 3 as it follows from times and prices, in Markdown."""
    times = deduced_times_s()
    lines = [
        "| GPUs | printed time | time | speed-up | efficiency | USD per run | USD added | printed |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for index, (column, time_s) in enumerate(zip(TABLE_3, times, strict=True)):
        added = printed = ""
        if column.added_usd is not None:
            added = f"{column.usd(time_s) - TABLE_3[index - 1].usd(times[index - 1]):+.2f}"
            printed = f"{column.added_usd:+.2f}"
        speed_up = times[0] / time_s
        efficiency = 100 * speed_up / column.gpus
        lines.append(
            f"| {column.gpus} | {duration_text(column.mean_s).removesuffix(' 00 s')} | {duration_text(time_s)} "
            f"| {speed_up:.2f} | {efficiency:.0f} % | {column.usd(time_s):.2f} | {added} | {printed} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    print(table())
    corrected_s = without_flawed_run_s()
    print(
        f"\n8 GPUs without the run at a global batch of 128: {duration_text(corrected_s)}, "
        f"{EIGHT.usd(corrected_s):.2f} USD, efficiency {100 * deduced_times_s()[0] / corrected_s / 8:.0f} %."
    )
    print(f"16 GPUs for the printed 16 h 24 m: {SIXTEEN.usd():.2f} USD.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
