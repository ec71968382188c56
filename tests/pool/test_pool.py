from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.endpoint.options import EndpointOptions
from hetero.errors import AuthenticationError, ChildFailedError, ConfigError, ExitCode, HeteroError, PortError
from hetero.reader.reader import Reader
from hetero.spec import DatasetSpec


def failure_of(job: Any, tools: Any, **options: Any) -> HeteroError:
    pool = job.pool(ready=False, **options)
    tools.wait_for(lambda: pool.failure is not None)
    with pytest.raises(HeteroError):
        pool.wait_ready(0.0)
    assert pool.records == ()
    return pool.failure


def test_pool_publishes_endpoints_and_stops_them(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2, num_slots=3)
    first, second = pool.records
    assert (first.endpoint_id, second.endpoint_id) == ("algo-1/0", "algo-1/1")
    assert first.address.startswith("127.0.0.1:")
    assert first.address != second.address
    assert first.num_slots == 3
    assert first.launch == second.launch != ""
    tools.wait_for(lambda: job.directory.records() == pool.records)  # a separate thread adds each endpoint
    pids = pool.pids
    pool.stop()
    pool.stop()
    assert job.directory.records() == ()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.fault("F2")
def test_endpoints_are_killed_before_their_launcher_if_memory_runs_out(job: Any) -> None:
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in job.pool().pids]
    assert min(scores) > int(Path("/proc/self/oom_score_adj").read_text())


def test_pool_names_a_script_that_does_not_exist(job: Any, tools: Any) -> None:
    error = failure_of(job, tools, script=str(job.path / "absent.py"))
    assert isinstance(error, ConfigError)
    assert "absent.py' does not exist on algo-1" in str(error)


def test_pool_names_a_script_without_a_data_set(job: Any, tools: Any) -> None:
    script = job.path / "plain.py"
    script.write_text("print('imported as', __name__)\n")
    error = failure_of(job, tools, script=str(script))
    assert isinstance(error, ConfigError)
    assert "plain.py' registers no data set" in str(error)
    assert "@hetero.dataset" in str(error)
    assert "algo-1/script: imported as __hetero_script__" in job.lines
    assert "--data-service" not in str(error)


def test_pool_that_is_given_a_script_for_tf_data_service_says_what_is_missing(job: Any, tools: Any) -> None:
    script = job.path / "plain.py"
    script.write_text("import hetero.tf\n")
    error = failure_of(job, tools, script=str(script))
    assert isinstance(error, ConfigError)
    assert "launch with --data-service tf" in str(error)


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("raise LookupError('no such column')", "under if __name__ == "),
        ("raise SystemExit(2)", "under if __name__ == "),
        ("import nosuchpackage", "Install the same packages there"),
        ("from hetero.batches import nosuchname", "Install the same packages there"),
        ("raise SyntaxError('x')", ""),
        ("import hetero; hetero.dataset(3)", ""),
    ],
)
def test_pool_shows_once_why_a_script_cannot_be_imported(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture, statement: str, advice: str
) -> None:
    script = job.path / "broken.py"
    script.write_text(f"import sys\nassert sys.argv[1:] == ['--a', 'b c']\n{statement}\n")
    error = failure_of(job, tools, script=str(script), script_args=("--a", "b c"))
    assert advice in str(error)
    assert bool(advice) == ("Data hosts" in str(error))
    assert "line 3" in str(error)
    # The launcher logs the whole error.
    (told,) = [record.getMessage() for record in caplog.records if "gives up" in record.getMessage()]
    assert told == f"hetero gives up the endpoints of algo-1: {str(error).splitlines()[0]}"
    if statement.startswith("raise "):
        assert isinstance(error, ChildFailedError)
        assert error.exit_code is ExitCode.SCRIPT_FAILED
        assert statement[6:12] in str(error).splitlines()[0]


def test_pool_with_a_bad_token_file_or_address_fails(job: Any, tools: Any) -> None:
    assert isinstance(failure_of(job, tools, token_path=str(job.path / "absent")), AuthenticationError)
    assert isinstance(failure_of(job, tools, host="algo-2", address="192.0.2.1"), PortError)


def test_pool_gives_up_after_its_restarts_and_says_so(job: Any, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = job.pool(endpoint_restarts=1)
    for _ in range(2):
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSEGV)
        tools.wait_for(lambda: pool.failure or (pool.pids and pid not in pool.pids))  # noqa: B023
    assert isinstance(pool.failure, ChildFailedError)
    assert "algo-1/0 killed by SIGSEGV: a crash in native code" in str(pool.failure)
    assert "most recent call first" in str(pool.failure)
    assert pool.num_restarts == 1
    assert "hetero gives up the endpoints of algo-1: " in caplog.text


@pytest.mark.fault("F1")
def test_pool_starts_over_when_the_fork_server_dies(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    before = pool.records
    with Path(f"/proc/{pool.pids[0]}/stat").open() as file:
        fork_server = int(file.read().rpartition(")")[2].split()[1])
    os.kill(fork_server, signal.SIGKILL)
    tools.wait_for(lambda: len(pool.records) == 2 and not set(pool.records) & set(before))
    assert pool.num_restarts == 1
    assert len({record.launch for record in (*before, *pool.records)}) == 1  # the host is the same


def test_endpoint_that_dies_after_the_fork_server_woke_for_nothing_is_started_again(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    fork_server = psutil.Process(pool.pids[0]).parent()
    for _ in range(3):  # wakes it, and no command has come
        num_waits = fork_server.num_ctx_switches().voluntary
        fork_server.send_signal(signal.SIGCHLD)
        tools.wait_for(lambda num_waits=num_waits: fork_server.num_ctx_switches().voluntary > num_waits)
    before = pool.pids[0]
    os.kill(before, signal.SIGKILL)
    tools.wait_for(lambda: len(pool.records) == 2 and before not in pool.pids)
    assert pool.num_restarts == 1


def test_pool_of_a_killed_process_leaves_nothing(job: Any, tools: Any, tmp_path: Path) -> None:
    program = tmp_path / "host.py"
    program.write_text(
        textwrap.dedent("""
            import sys
            from hetero.endpoint.options import EndpointOptions
            from hetero.pool.pool import EndpointPool, PoolOptions
            options = EndpointOptions(
                script=sys.argv[1], host="algo-1", address="127.0.0.1", num_endpoints=2, job_id="x"
            )
            pool = EndpointPool(PoolOptions(endpoint=options), lambda records: None)
            pool.start()
            pool.wait_ready(300.0)
            print(*pool.pids, flush=True)
            sys.stdin.read()
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(program), str(job.script)], stdin=-1, stdout=-1, text=True, env=environment
    ) as host:
        assert host.stdout is not None
        pids = host.stdout.readline().split()
        host.kill()
    assert len(pids) == 2
    tools.wait_for(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize("needs_fresh", [THREAD, ""])
def test_pool_serves_by_fork_or_by_fresh_processes(job: Any, tools: Any, needs_fresh: str) -> None:
    job.script.write_text(f"{needs_fresh}\n{job.script.read_text()}")
    pool = job.pool(num_endpoints=2)
    assert any("fresh processes" in line for line in job.lines) is bool(needs_fresh)
    commands = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2] for pid in pool.pids}
    assert commands == {b"hetero.endpoint.endpoint" if needs_fresh else b"hetero.pool.fork_server"}
    wanted = tools.requests(tools.spec())
    with Reader(job.fleet(), iter(wanted)) as reader:
        assert len(list(reader)) == len(wanted)


def test_pool_does_not_leak_the_token(job: Any) -> None:
    pool = job.pool(log_level="DEBUG")
    secret = job.token.reveal()
    for pid in pool.pids:
        for name in ("environ", "cmdline"):
            assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert not [line for line in job.lines if secret in line]


def test_pool_emulates_slots_and_reports_it(job: Any, tools: Any) -> None:
    pool = job.pool(num_slots=4, sample_time_s=0.02)
    wanted = tools.requests(tools.spec(), num_batches=16)
    with Reader(job.fleet(), iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    pool.stop()
    facts = pool.statistics()
    assert facts["num_batches"] == 16
    assert facts["num_overruns"] < 16


def test_pool_counts_emulation_overruns(job: Any, tools: Any) -> None:
    pool = job.pool(sample_time_s=0.001)
    wanted = tools.requests(tools.spec(sample_s=0.01), num_batches=4)
    with Reader(job.fleet(), iter(wanted)) as reader:
        assert len(list(reader)) == 4
    pool.stop()
    assert pool.statistics()["num_overruns"] == 4


def test_endpoint_dumps_its_stacks_on_request(job: Any, tools: Any) -> None:
    pool = job.pool()
    os.kill(pool.pids[0], signal.SIGUSR1)
    tools.wait_for(lambda: any("run_endpoint" in line for line in job.lines))


def test_pool_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_endpoints is 0, expected at least 1"):
        EndpointOptions(script="s.py", host="h", address="127.0.0.1", num_endpoints=0, job_id="x")


def test_files_that_the_import_opens_are_not_shared_by_endpoints(job: Any, tools: Any) -> None:
    data = job.path / "numbers.bin"
    data.write_bytes(bytes(range(100)))
    script = job.path / "reading.py"
    script.write_text(
        textwrap.dedent(f"""
            import numpy as np
            import hetero

            FILE = open({str(data)!r}, "rb", buffering=0)

            class Numbers:
                def __len__(self):
                    return 100

                def __getitem__(self, index):
                    FILE.seek(index)
                    return np.int64(FILE.read(1)[0])

            @hetero.dataset(collate_fn=np.array)
            def numbers_in_a_file():
                return Numbers()
        """)
    )
    job.pool(num_endpoints=2, script=str(script))
    wanted = tools.requests(DatasetSpec("numbers_in_a_file"), num_batches=50)
    with Reader(job.fleet(), iter(wanted)) as reader:
        assert [batch.tolist() for batch in reader] == [request.work.indices.tolist() for request in wanted]
    reason = f"endpoints start as fresh processes: importing the script opened {data}, which processes must not share"
    assert any(reason in line for line in job.lines)


def test_factory_may_use_processes_of_its_own(job: Any, tools: Any) -> None:
    script = job.path / "pooled.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing
            import numpy as np
            import hetero

            @hetero.dataset(collate_fn=np.array)
            def pooled():
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    return pool.map(abs, range(100))
        """)
    )
    pool = job.pool(num_endpoints=2, script=str(script))
    wanted = tools.requests(DatasetSpec("pooled"))
    with Reader(job.fleet(), iter(wanted)) as reader:
        assert [batch.tolist() for batch in reader] == [request.work.indices.tolist() for request in wanted]
    assert pool.num_restarts == 0
