"""Whole jobs under TLS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.wire.certificates import make_certificates
from tests.support.integration.harness import StartJob, StartLauncher, chains, chains_alone
from tests.support.wire.job_certificates import folder

GROUPS = ["data_group=ml.c5.9xlarge:1", "dnn_group=ml.p3.2xlarge:1"]
SAMPLES = ["--epochs", "1", "--num-samples", "400"]


def certificates(tmp_path: Path, num_hosts: int = 2) -> Path:
    folder("job")  # skips without openssl
    made = tmp_path / "certificates"
    make_certificates(made, [f"algo-{number + 1}" for number in range(num_hosts)])
    return made


def test_chain_under_tls_that_the_simulation_makes_is_the_one_without(start_job: StartJob) -> None:
    folder("job")  # skips without openssl
    groups = ["data_group=ml.c5.9xlarge:1", "dnn_group=ml.p3.2xlarge:2"]
    flags = ["--endpoints-per-host", "1", "--trainer-endpoints", "1", "--nproc-per-node", "2"]
    job = start_job(groups, "--tls", *flags, args=SAMPLES)
    assert job.wait() == 0, job.output
    assert chains(job.directory, 4) == chains_alone(*SAMPLES, num_ranks=4)


def test_endpoint_killed_under_tls_gives_the_same_chain(start_job: StartJob, tmp_path: Path) -> None:
    args = ["--faults", "sleep_s=0.01", *SAMPLES]
    job = start_job(GROUPS, "--endpoints-per-host", "2", "--tls-dir", str(certificates(tmp_path)), args=args)
    job.wait_line("step 10")
    job.find("hetero.pool.fork_server")[0].children()[0].send_signal(signal.SIGKILL)
    assert job.wait() == 0, job.output
    assert chains(job.directory, 1) == chains_alone(*SAMPLES)
    assert job.report()["run"]["events"]["endpoint restarts"] == 1


@pytest.mark.attack("A18")
def test_host_with_another_authority_ends_the_job_naming_the_check(start_job: StartJob, tmp_path: Path) -> None:
    made, other = certificates(tmp_path), folder("other")
    for kind in ("pem", "key"):  # another complete set, as after a second run of hetero certs
        (made / f"algo-1.{kind}").write_bytes((other / f"algo-1.{kind}").read_bytes())
    job = start_job(GROUPS, "--tls-dir", str(made))
    job.wait_line("another authority signed it")
    job.process.send_signal(signal.SIGINT)
    assert job.wait() != 0
    assert "HET-22" in job.failure("algo-1")


@pytest.mark.attack("A18")
def test_hosts_of_different_authorities_end_at_the_start_naming_the_check(start_launcher: StartLauncher) -> None:
    kinds = {"algo-2": "job", "algo-1": "other"}
    jobs = [
        start_launcher(host, "--tls-dir", str(folder(kind)), "--start-timeout", "15") for host, kind in kinds.items()
    ]
    codes = [job.wait() for job in jobs]
    # The first host may end before the other has seen its certificate. The other then waits in vain.
    assert set(codes) <= {20, 21, 22}, jobs[0].output + jobs[1].output
    first = jobs[codes.index(22)]
    written = (first.directory / "ml" / "output" / "failure").read_text().splitlines()[0]
    assert "TLS: its certificate is not valid: another authority signed it than this host's ca.pem" in written


@pytest.mark.attack("A18")
def test_host_in_plaintext_and_host_under_tls_never_start(start_launcher: StartLauncher) -> None:
    trainer = start_launcher("algo-2", "--tls-dir", str(folder("job")), "--start-timeout", "15")
    data = start_launcher("algo-1", "--start-timeout", "15")
    assert trainer.wait() == 20, trainer.output
    assert "does not speak TLS; give every host of the job --tls-dir" in trainer.output
    assert data.wait() == 21, data.output


def test_missing_certificates_are_named(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(["dnn_group=ml.p3.2xlarge:1"], "--tls-dir", str(tmp_path / "nowhere"))
    assert job.wait() == 22, job.output
    assert str(tmp_path / "nowhere" / "ca.pem") in job.failure("algo-1")


def test_tls_is_made_or_given_not_both(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hetero.cli", "simulate", "--group", "dnn_group=ml.p3.2xlarge:1", "--tls"]
    result = subprocess.run(
        [*command, "--tls-dir", str(tmp_path), "--output-dir", str(tmp_path / "run"), __file__],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "give one of them" in result.stderr
