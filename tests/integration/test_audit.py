"""Ledgers of whole jobs: the same data whatever the placement, and told when it was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness import CHAIN, DNN, Job, StartJob

from hetero.audit.reading import read_ledger

DATA = "data_group=ml.c5.9xlarge:2"


def audit(one: Path, other: Path) -> tuple[int, str]:
    """Run the command; return its exit status and what it prints."""
    command = [sys.executable, "-m", "hetero.cli", "audit", str(one), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def run_of(job: Job) -> Path:
    return job.directory / "run"


def test_audit_of_jobs_with_and_without_data_hosts_says_the_same(start_job: StartJob) -> None:
    jobs = []
    for groups, args in (([DNN], []), ([DATA, DNN], []), ([DATA, DNN], ["--num-samples", "90"])):
        job = start_job(groups, "--nproc-per-node", "2", "--endpoints-per-host", "1", "--audit", args=args)
        assert job.wait() == 0, job.output
        jobs.append(job)
    plain, remote, other = map(run_of, jobs)
    # Beside the report, on the host that the ranks ran on.
    (host,) = [path.parent for path in remote.rglob("report.json") if path.parent != remote]
    assert {path.name for path in host.glob("ledger-*")} == {"ledger-rank-0.jsonl", "ledger-rank-1.jsonl"}
    status, text = audit(plain, remote)
    assert (status, "The same data: 28 batches are equal bit for bit." in text) == (0, True), text
    status, text = audit(plain, other)
    assert (status, "the first difference is at epoch 0, position 0: the indices differ" in text) == (1, True), text


def test_audit_of_a_script_without_a_launcher_and_of_jobs_that_failed(start_job: StartJob, tmp_path: Path) -> None:
    ledgers = tmp_path / "ledgers"
    environment = {**os.environ, "HETERO_AUDIT_DIR": str(ledgers)}
    subprocess.run([sys.executable, str(CHAIN), "--output", str(tmp_path)], env=environment, check=True)
    raised = start_job([DNN], "--audit", args=["--fail-at", "5"])
    killed = start_job([DATA, DNN], "--endpoints-per-host", "1", "--audit", args=["--kill-at", "7"])
    assert raised.wait() != 0
    assert killed.wait() != 0
    for job, num_batches, has_end in ((raised, 5, True), (killed, 7, False)):
        (path,) = run_of(job).rglob("ledger-rank-0.jsonl")
        record = read_ledger(path)
        assert (len(record.entries), record.has_end, record.damage) == (num_batches, has_end, "")
        status, text = audit(ledgers, run_of(job))
        assert status == 1, text
        assert f"B ends before epoch 0, position {num_batches}" in text
        assert "they part" not in text
