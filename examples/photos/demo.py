"""Train one script as a homogeneous and as a heterogeneous job, simulated here, and compare what they cost.

    python examples/photos/demo.py

It takes about a minute on two cores. The JPEGs, their decoding, the training
of both ranks, every process and every byte between them are real. What this
machine lacks is emulated, in both runs alike: each sample costs
``SAMPLE_TIME_S`` of a vCPU of its host, and each step takes ``STEP_TIME_S`` of
the accelerator.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SAMPLE_TIME_S = 0.06
"""A heavy augmentation: the 64 samples of a step take the 8 vCPUs of an ml.p3.2xlarge 0.48 s."""
STEP_TIME_S = 0.15
"""Longer than decoding and training really take on two cores, because the emulated time must decide."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: that of the first command that fails."""
    parser = argparse.ArgumentParser(description="Compare a homogeneous with a heterogeneous job.", allow_abbrev=False)
    parser.add_argument("--data", default="data/photos", help="folder of the images, made if need be (%(default)s)")
    parser.add_argument("--output-dir", default="runs/demo", help="folder of the reports (%(default)s)")
    args = parser.parse_args(argv)

    here = os.path.relpath(Path(__file__).parent)
    homogeneous, heterogeneous = f"{args.output_dir}/homogeneous", f"{args.output_dir}/heterogeneous"
    data_group, trainer_group = "--group=data_group=ml.c5.9xlarge:2", "--group=dnn_group=ml.p3.2xlarge:1"
    emulation = [f"--emulate-sample-seconds={SAMPLE_TIME_S}", f"--emulate-step-seconds={STEP_TIME_S}"]
    options = ["--nproc-per-node=2", *emulation, "--price-profile=seed-2022"]
    script = [f"{here}/train.py", f"--data={args.data}", "--image-size=64"]
    commands = {
        "Real JPEGs": ["python", f"{here}/make_data.py", f"--output={args.data}"],
        "Homogeneous: the trainer host loads its own data": [
            *("hetero", "simulate", trainer_group, *options, f"--output-dir={homogeneous}", *script),
        ],
        "Heterogeneous: the same script, with two data hosts": [
            # The data hosts make all batches, so that a plan can be made from this run too.
            *("hetero", "simulate", data_group, trainer_group, "--trainer-endpoints=0"),
            *(*options, f"--output-dir={heterogeneous}", *script),
        ],
        "Was it worth it?": ["hetero", "report", homogeneous, heterogeneous],
    }
    for number, (title, command) in enumerate(commands.items(), start=1):
        print(f"\n=== {number}/{len(commands)} {title}\n$ {shlex.join(command)}\n", flush=True)
        if code := run(command):
            return code
    print(f"\nMore of each run: {homogeneous}/report.md, {heterogeneous}/report.md", flush=True)
    return 0


def run(command: Sequence[str]) -> int:
    """Run ``python`` or ``hetero`` of this environment and return its exit code, 128 + N if signal N ended it."""
    program = {"python": [sys.executable], "hetero": [sys.executable, "-m", "hetero.cli"]}[command[0]]
    with subprocess.Popen([*program, *command[1:]]) as process:
        # Ctrl-C reaches the child as well. The child ends its job in order, and this process waits for it.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
