"""Train one script as a homogeneous and as a heterogeneous job, simulated here, and compare what they cost.

    python examples/photos/demo.py

It takes one to three minutes on two cores, and longer on slow or busy ones.
The JPEGs, their decoding, the training of both ranks, every process and every
byte between them are real. What this machine lacks is emulated, in both runs
alike: each sample costs a time of a vCPU of its host, and each step takes a
time of the accelerator. The real work has to fit into these times. So the
demo first runs the job without emulation, and chooses the times by those of
the real work.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hetero.report import compare, load_report

LEAST_STEP_S = 0.15
"""Shortest emulated step. The processes and the transport add about 1 ms to a step, which must not matter."""
ROOM = 2.0
"""Emulated step / real work of a step. Work comes in bursts, and a busy machine changes from second to second."""
SAMPLE_SHARE = 0.4
"""vCPU time of a sample / emulated step. The 64 samples of a step take the 8 vCPUs of an ml.p3.2xlarge 3.2 steps, so
data is what the homogeneous job waits for."""
WARMUP_STEPS, NUM_STEPS = 7, 28
"""The homogeneous job gets its batches in bursts of 8, one for each vCPU, which are 4 steps. The 20 steps that are
measured are 5 whole bursts, so their mean is that of a long run. What a late start has left lies before them."""
NUM_MEASURING_STEPS = 18


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: that of the first command that fails."""
    parser = argparse.ArgumentParser(description="Compare a homogeneous with a heterogeneous job.", allow_abbrev=False)
    parser.add_argument("--data", default="data/photos", help="folder of the images, made if need be (%(default)s)")
    parser.add_argument("--output-dir", default="runs/demo", help="folder of the reports (%(default)s)")
    parser.add_argument("--step-seconds", type=float, help="emulated time of a step (chosen by measuring this machine)")
    args = parser.parse_args(argv)

    here = os.path.relpath(Path(__file__).parent)
    runs = {name: f"{args.output_dir}/{name}" for name in ("measured", "homogeneous", "heterogeneous")}
    trainer_group = "--group=dnn_group=ml.p3.2xlarge:1"
    # The data hosts make all batches, so a plan can be made from this run too.
    all_groups = ["--group=data_group=ml.c5.9xlarge:2", trainer_group, "--trainer-endpoints=0"]
    options = ["--nproc-per-node=2", f"--warmup-steps={WARMUP_STEPS}"]
    script = [f"{here}/train.py", f"--data={args.data}", "--image-size=64", "--epochs=1"]

    def simulate(name: str, *flags: str, num_steps: int = NUM_STEPS) -> list[str]:
        return [
            *("hetero", "simulate", *flags, *options, f"--output-dir={runs[name]}"),
            *(*script, f"--steps-per-epoch={num_steps}"),
        ]

    if code := run("1/5 Real JPEGs", ["python", f"{here}/make_data.py", f"--output={args.data}"]):
        return code
    step_s = args.step_seconds
    if step_s is None:
        command = simulate("measured", *all_groups, num_steps=NUM_MEASURING_STEPS)
        if code := run("2/5 Measure this machine: the job without emulation", command):
            return code
        real_s = real_work_s(runs["measured"])
        step_s = emulated_step_s(real_s)
        print(
            f"\nThe real work of a step takes this machine {1000 * real_s:.0f} ms. So the emulated accelerator takes "
            f"{1000 * step_s:.0f} ms for a step, and a sample costs {1000 * SAMPLE_SHARE * step_s:.0f} ms of a vCPU."
        )
    emulation = [f"--emulate-sample-seconds={SAMPLE_SHARE * step_s:g}", f"--emulate-step-seconds={step_s:g}"]
    emulation.append("--price-profile=seed-2022")
    page = f"{args.output_dir}/comparison.html"
    commands = {
        "3/5 Homogeneous: the trainer host loads its own data": simulate("homogeneous", trainer_group, *emulation),
        "4/5 Heterogeneous: the same script, with two data hosts": simulate("heterogeneous", *all_groups, *emulation),
        "5/5 Was it worth it?": ["hetero", "report", runs["homogeneous"], runs["heterogeneous"], f"--html={page}"],
    }
    for title, command in commands.items():
        if code := run(title, command):
            return code
    comparison = compare(load_report(runs["homogeneous"]), load_report(runs["heterogeneous"]))
    if comparison.is_worth_it is None:
        flags = [f"--data={args.data}", f"--output-dir={args.output_dir}", f"--step-seconds={2 * step_s:g}"]
        print(f"\nTo decide: {shlex.join([os.path.relpath(sys.executable), f'{here}/demo.py', *flags])}")
    print(f"\nMore of each run: {runs['homogeneous']}/report.md, {runs['heterogeneous']}/report.md")
    print(f"Both runs on one page: {page}", flush=True)
    return 0


def real_work_s(folder: str) -> float:
    """Return the seconds that the real work of a step takes, decoding included, from a run without emulation."""
    headline = load_report(folder).headline
    if headline is None or headline.step_time_mean is None:
        raise SystemExit(f"{folder} has no measured step, so the emulated times cannot be chosen. Give --step-seconds.")
    return headline.step_time_mean.value


def emulated_step_s(real_s: float) -> float:
    """Return the time of an emulated step, in steps of 50 ms, that has room for ``real_s`` seconds of real work."""
    return max(LEAST_STEP_S, math.ceil(round(ROOM * real_s / 0.05, 6)) * 0.05)


def run(title: str, command: Sequence[str]) -> int:
    """Run ``python`` or ``hetero`` of this environment and return its exit code, 128 + N if signal N ended it."""
    print(f"\n=== {title}\n$ {shlex.join(command)}\n", flush=True)
    program = {"python": [sys.executable], "hetero": [sys.executable, "-m", "hetero.cli"]}[command[0]]
    with subprocess.Popen([*program, *command[1:]]) as process:
        # Ctrl-C reaches the child as well. The child ends its job in order, and this process waits for it.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
