"""Whole jobs at debug level: the token is nowhere to be found, and nothing listens where it should not."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from hetero.control.security import TOKEN_FILE_VARIABLE, load_token
from tests.support.integration.harness import CHAIN, TORCH_CHAIN, Job, StartJob, StartLauncher, failure

pytestmark = pytest.mark.integration

REVEALING = CHAIN.with_name("revealing.py")
GROUPS = ["data_group=ml.c5.9xlarge:1", "dnn_group=ml.p3.2xlarge:1"]
GRPC_DEBUG = {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "http,http_keepalive,call_error,channel,http2_stream_state"}
PYTHON_DEBUG = {"PYTHONFAULTHANDLER": "1", "PYTHONDEVMODE": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def token_of(job: Job) -> bytes:
    """Return the job's token as a process of the job reads it."""
    launcher = job.find("hetero.cli launch")[0]
    return load_token(launcher.environ()[TOKEN_FILE_VARIABLE]).reveal().encode()


def told(processes: Sequence[psutil.Process]) -> Iterator[tuple[str, bytes]]:
    """Yield what every user of the machine, or at least this one, can read of processes: argv and environment."""
    for process in processes:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                yield f"{name} of {process.pid}", Path(f"/proc/{process.pid}/{name}").read_bytes()


def left(job: Job, *folders: Path) -> Iterator[tuple[str, bytes]]:
    """Yield everything that a job wrote."""
    yield "output", job.output.encode()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield str(path), path.read_bytes()


def check(token: bytes, texts: Iterator[tuple[str, bytes]]) -> int:
    """Check that the token, in no spelling, is in any of the texts. Return how many there were."""
    spellings = [token, token.hex().encode(), token[::-1], b"Bearer " + token[:8], token[:24]]
    count = 0
    for name, text in texts:
        count += 1
        for spelling in spellings:
            assert spelling not in text, f"the token is in {name}"
    return count


@pytest.mark.attack("A15")
@pytest.mark.parametrize(
    ("args", "code", "debug"),
    [
        pytest.param((), 0, {}, id="well", marks=pytest.mark.long),
        pytest.param(
            ("--raise-at", "30", "--kill-at", "30", "--fail-at", "20"), 30, GRPC_DEBUG, id="all that can fail, traced"
        ),
    ],
)
def test_token_of_a_simulated_job_is_in_nothing_that_it_says_or_leaves(
    start_job: StartJob, tmp_path: Path, args: Sequence[str], code: int, debug: Mapping[str, str]
) -> None:
    job = start_job(
        GROUPS,
        *("--endpoints-per-host", "1", "--log-level", "debug"),
        script=REVEALING,
        args=["--hold", str(tmp_path / "looked"), *args],
        environment={**PYTHON_DEBUG, **debug},
    )
    job.wait_line("step 5")
    token = token_of(job)
    seen = check(token, told(job.processes()))
    assert seen >= 2 * 6  # simulate, two launchers, fork server, endpoint, agent, rank, where they could be read
    (tmp_path / "looked").touch()
    assert job.wait() == code, job.output[-3000:]
    folders = [job.directory, tmp_path]
    assert check(token, left(job, *folders)) > 8
    assert "environment of an endpoint" in job.output
    if args:
        assert "broken on purpose with" in job.output
        assert "the endpoint died 3 times" in job.output
        assert "what a rank holds" in job.output
        assert "Token(...)" in job.output
        assert "authorization" in job.output  # it was traced, without its value


@pytest.mark.attack("A15")
@pytest.mark.attack("A1")
@pytest.mark.parametrize("wrong", [False, True], ids=["accepted", "refused"])
def test_token_from_a_file_is_in_nothing_that_launchers_say_or_leave(
    start_launcher: StartLauncher, tmp_path: Path, wrong: bool
) -> None:
    args = ["--num-samples", "800", "--step-s", "0.01"]
    secret = "a-secret-that-nobody-says"
    trainer = start_launcher("algo-2", "--log-level", "debug", args=args, token=secret)
    data = start_launcher("algo-1", "--log-level", "debug", args=args, token=f"other-{secret}" if wrong else secret)
    token = f"{secret}-of-the-job".encode()
    if not wrong:
        trainer.wait_line("step 5")
    for job in (trainer, data):
        check(token, told(job.processes()))
    assert (trainer.wait(), data.wait()) == ((22, 22) if wrong else (0, 0)), trainer.output
    assert not wrong or "token" in failure(trainer)
    for job in (trainer, data):
        (job.directory / "token").unlink()
        check(token, left(job, job.directory))


def listening(job: Job) -> dict[str, list[tuple[str, int]]]:
    """Return what each process of a job listens on, by its command."""
    names = {process.pid: f"{process.pid} {' '.join(process.cmdline())}" for process in job.processes()}
    found: dict[str, list[tuple[str, int]]] = {}
    for connection in psutil.net_connections("inet"):
        if connection.pid in names and connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
            ip = connection.laddr.ip.removeprefix("::ffff:")  # gRPC's sockets are of IPv6, bound to one address of IPv4
            found.setdefault(names[connection.pid], []).append((ip, connection.laddr.port))
    return found


@pytest.mark.attack("A19")
def test_launchers_and_endpoints_alone_listen_on_their_hosts_addresses(start_job: StartJob, tmp_path: Path) -> None:
    args = ["--gloo", "--step-s", "0.05", "--num-samples", "2000"]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # torch's own, which it keeps
    flags = ["--endpoints-per-host", "1", "--trainer-endpoints", "1", "--nproc-per-node", "2"]
    job = start_job(GROUPS, *flags, script=TORCH_CHAIN, args=args, environment=environment)
    job.wait_line("step 3")
    found = listening(job)
    job.process.terminate()
    assert job.wait() == 143, job.output[-3000:]
    own = {command: places for command, places in found.items() if "hetero.launch" not in command}
    others = {command: places for command, places in found.items() if "hetero.launch" in command}
    # A launcher has one port, and another one for its ranks. An endpoint has two, for calls and for batches. The
    # simulation locks its block of addresses by a datagram socket on the first one. Nothing else listens.
    kinds = ("hetero.cli simulate", "hetero.cli launch", "hetero.pool")
    numbers = Counter(
        (next((kind for kind in kinds if kind in command), command), len(places)) for command, places in own.items()
    )
    launchers = {("hetero.cli launch", 1): 1, ("hetero.cli launch", 2): 1}
    assert numbers == {("hetero.cli simulate", 1): 1, **launchers, ("hetero.pool", 2): 2}, own
    ips = {ip for places in own.values() for ip, _ in places}
    blocks = {ip.rpartition(".")[0] for ip in ips}
    assert len(blocks) == 1, own
    assert re.fullmatch(r"127\.\d+\.0", blocks.pop()), own
    assert {ip.rpartition(".")[2] for ip in ips} - {"1"} == {"2", "3"}, own
    # The store of rank 0 and gloo are torch's, and torch chooses their addresses, see SECURITY.md.
    everywhere = {port for places in others.values() for ip, port in places if ip in ("::", "0.0.0.0")}
    assert len(everywhere) <= 2, others
