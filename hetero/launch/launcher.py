"""The launcher process of a host. It runs this host's part of the job and exits with the job's exit code.

A host passes through these states (`hetero.control.status.HostState`):

    INIT        The control port is open, and endpoints are starting.
    WAIT_PEERS  Trainer host: its endpoints are ready, and it waits for every other host.
    SERVING     Data host: its endpoints serve until every trainer host is done.
    TRAINING    Trainer host: its ranks run.
    DRAINING    Data host: endpoints accept no new requests, and finish the requests that they have accepted.
    DONE        The host ended without a failure. Every living peer learns this before the process exits.
    FAILED      The root cause of the job's failure is known. The host kills all its processes.

If a rank fails and --job-restarts allows it, the arbiter restarts the trainer group instead. Every trainer host then
kills its ranks, and passes through INIT, WAIT_PEERS and TRAINING again. Data hosts continue to serve.

All of this runs on the main thread. Signal handlers only count signals. The exit code is 0, the code of the root cause,
or 128 + 15 after SIGTERM (0 with --sigterm-ok).
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from pathlib import Path

from hetero.cluster import ClusterSpec, Platform, Role, several_trainers
from hetero.cluster.roles import check_spot_groups
from hetero.config import LaunchOptions, framework_of
from hetero.control.status import Cause, HostState
from hetero.documents.files import make_output_folder, write_text
from hetero.errors import ExitCode, HeteroError
from hetero.launch.failure import reserved_space, shown_detail, write_failure
from hetero.launch.host import JobEndsError, LaunchedHost, RestartError, StoppedEarlyError, cause_of
from hetero.launch.ranks.leader import Follower, LocalLeader, meeting_name
from hetero.launch.ranks.mpi_ranks import MpiStarter
from hetero.launch.ranks.parent_launcher import find_parent, take_variables
from hetero.launch.ranks.ranks import AgentStarter
from hetero.launch.ranks.starter import RankStarter
from hetero.launch.roles import serve, train
from hetero.system import logs
from hetero.system.fault_injection import permit_faults
from hetero.system.scripts import find_script

__all__ = ["launch"]

logger = logging.getLogger(__name__)

_END_S = 20.0
"""Seconds for a host to kill its processes and end after its job has failed. Then the watchdog ends this process."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN)
"""Errors that mean that the system lacks a resource."""


def launch(options: LaunchOptions, cluster: ClusterSpec, *, platform: Platform) -> int:
    """Run this host's part of the job and return its exit code. Call it on the main thread.

    Raises:
        ConfigError: If the script does not exist, the output folder cannot be written, the plan is malformed,
            `HETERO_FAULTS` is set where it is not allowed, or ``--spot`` names no data group.
    """
    find_script(options.script, is_module=options.module)
    # Check the output folder now, although its files are written at the end. On a read-only file system, a job once
    # trained to its end, could not write its report, and still ended with 0.
    if options.output_dir is not None:
        make_output_folder(options.output_dir)
    # Check the plan now too, although only the report at the end uses it.
    if options.plan is not None:
        # This module imports NumPy, which the launchers of jobs without a plan do not need.
        from hetero.report.plan import load_plan

        load_plan(options.plan)
    logs.setup_logging(
        group=cluster.current_group.name, host=cluster.current_host, role=cluster.role.value, level=options.log_level
    )
    logger.info("platform: %s, from %s", platform.name, cluster.source)
    spot_groups = [text.rpartition("=")[0] for text in options.spot_groups]
    check_spot_groups(spot_groups, {group.name: group.role for group in cluster.groups})
    # Injected faults need --allow-faults on a platform, but not on the hosts of `hetero simulate`.
    is_simulated = "HETERO_SIMULATED" in os.environ
    permit_faults(
        os.environ,
        allow=options.allow_faults,
        host=cluster.current_host,
        platform="" if is_simulated else cluster.source,
    )
    # Ranks must not inherit variables with the prefixes in `stripped`, because a program in a rank would misread them.
    for name in [name for name in os.environ if name.startswith(platform.stripped)]:
        del os.environ[name]
    # If mpirun or torchrun made several processes on this host, only one of them does the host's work.
    parent = find_parent(os.environ)
    if parent is None:
        return _lead(options, cluster, platform, AgentStarter(framework_of(options)))
    variables = take_variables(os.environ, parent)
    # mpirun copies the platform's variables of its first host to all other hosts, for example SM_CURRENT_HOST. Correct
    # the copied ones.
    if parent.gives_ranks:
        own_variables = platform.own_variables(cluster)
        os.environ.update({name: value for name, value in own_variables.items() if name in os.environ})
    name = meeting_name(
        parent, job_id=platform.job_id(cluster), host=cluster.current_host, base_dir=platform.folders.root
    )
    # Under torchrun, the launcher with local rank 0 leads, and the other launchers of the host follow it. Under mpirun,
    # all launchers follow, and a child of the launcher with local rank 0 leads. The reason: a quarter of a second after
    # a process has failed, mpirun kills every process that it started. mpirun did not start the child, so the child
    # lives long enough to report the failure.
    forks_leader = parent.local_rank == 0 and parent.gives_ranks
    leader_pid = os.fork() if forks_leader else None
    # In the child, `fork` returns 0.
    is_forked_leader = leader_pid == 0
    if is_forked_leader:
        # Leave the process group, because mpirun sends its signals there.
        os.setsid()
    leads = is_forked_leader if forks_leader else parent.local_rank == 0
    if not leads:
        follower = Follower(
            parent,
            name,
            command=[sys.executable, "-m", "hetero.launch.ranks.rank", *options.command],
            variables=variables,
            stopped_code=options.stopped_code,
            leader_pid=leader_pid,
        )
        return _follow(follower, cluster.current_host, platform)
    logger.info("this launcher leads the %d processes that %s made on this host", parent.num_local, parent.name)
    with LocalLeader(parent, name) as leader:
        code = int(ExitCode.INTERNAL)
        try:
            starter = MpiStarter(leader) if parent.gives_ranks else AgentStarter(framework_of(options))
            code = _lead(options, cluster, platform, starter)
        finally:
            # Call this also after an exception, because the followers wait for an exit code.
            leader.finish(code)
        return code


def _follow(follower: Follower, host: str, platform: Platform) -> int:
    """Wait for the local leader of this host and return its exit code. Write the failure file if the leader is lost."""
    logger.info("another launcher process does the work of this host; this process starts its rank and waits")
    code = follower.run()
    if code is not None:
        return code
    cause = Cause(host=host, summary="the launcher of this host was lost", exit_code=ExitCode.ORPHANED)
    _show(cause, host)
    failure_file = platform.folders.failure
    if not failure_file.exists():
        write_failure(failure_file, cause)
    return int(cause.exit_code)


def _lead(options: LaunchOptions, cluster: ClusterSpec, platform: Platform, starter: RankStarter) -> int:
    """Run this host's part of the job as its only launcher, or as the local leader. Return the exit code."""
    code = _lead_to_end(options, cluster, platform, starter)
    # On Slurm, srun ends with the highest exit code of all hosts, even if only a data host failed and the job did not
    # need it. Therefore the first trainer host writes the exit code of the job to a file.
    path = platform.folders.exit_code
    if path is not None and cluster.current_host == cluster.trainer_hosts[0].name:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{code}\n")
        except OSError as error:
            logger.error("cannot write the job's exit code to %s: %s", path, error)
    return code


def _lead_to_end(options: LaunchOptions, cluster: ClusterSpec, platform: Platform, starter: RankStarter) -> int:
    """Set up this host, run its part of the job, and return the exit code.

    Most failures end in `_run`, which reports them to the other hosts. For other errors, such as one during the setup,
    this function logs the cause, writes the failure file, and returns the exit code of the cause.
    """
    failure_file = platform.folders.failure
    # Another thread writes the log lines, because a stopped reader of the output once blocked this launcher's threads
    # and its ranks (F37).
    with logs.write_behind(), reserved_space(failure_file):
        try:
            with LaunchedHost(options, cluster, platform=platform, environ=os.environ, starter=starter) as host:
                return _run(host, failure_file)
        except StoppedEarlyError:
            return options.stopped_code
        except HeteroError as error:
            cause = cause_of(error, cluster.current_host)
        except Exception as error:
            logger.exception("an error inside hetero")
            cause = _internal(error, cluster.current_host)
        _show(cause, cluster.current_host)
        write_failure(failure_file, cause)
        return int(cause.exit_code)


def _run(host: LaunchedHost, failure_file: Path) -> int:
    """Do the work of this host by its role, and return the exit code. If the job fails, end with the root cause."""
    groups = host.plan.cluster.groups
    group_texts = [f"{group.name}={group.instance_type}:{len(group.hosts)} ({group.role.value})" for group in groups]
    logger.info("job %s: %s", host.plan.job_id, ", ".join(group_texts))
    if host.plan.is_first_trainer:
        pairs = [(group.name, group.instance_type) for group in groups]
        roles = [group.role for group in groups]
        if warning := several_trainers(pairs, roles, host.plan.options.roles):
            logger.warning("%s", warning)
    try:
        if host.plan.cluster.role is Role.TRAINER:
            train(host)
        else:
            serve(host)
    except JobEndsError as end:
        return _abort(host, end.cause, failure_file)
    except StoppedEarlyError:
        return host.plan.options.stopped_code
    except HeteroError as error:
        return _abort(host, _agreed(host, cause_of(error, host.plan.name)), failure_file)
    except Exception as error:
        logger.exception("an error inside hetero")
        return _abort(host, _agreed(host, _internal(error, host.plan.name)), failure_file)
    # A profile run requests its own stop when everything is measured. Such a run is successful. If this host got a
    # signal, it was stopped.
    requested_own_stop = host.plan.options.profile and host.interrupted_s is None
    return host.plan.options.stopped_code if host.was_stopped and not requested_own_stop else int(ExitCode.OK)


def _internal(error: Exception, host: str) -> Cause:
    """Return the cause for an unexpected error. A lack of system resources has its own exit code."""
    lacks_resource = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)
    what = "not enough resources" if lacks_resource else "an error inside hetero"
    return Cause(
        host=host,
        summary=f"{what}: {type(error).__name__}: {error}",
        detail=traceback.format_exc(),
        exit_code=ExitCode.RESOURCES if lacks_resource else ExitCode.INTERNAL,
    )


def _agreed(host: LaunchedHost, cause: Cause) -> Cause:
    """Report a failure of this host, and return the root cause that the arbiter chooses."""
    try:
        host.fail(cause)
    except JobEndsError as end:
        return end.cause
    # The arbiter decided on a restart before it knew of this failure, so it has chosen no root cause for it.
    except RestartError:
        return cause


def _abort(host: LaunchedHost, cause: Cause, failure_file: Path) -> int:
    """Log and publish the root cause, write the failure file and report, stop the endpoints. Return the exit code."""
    with host.hub.membership() as membership:
        cause = membership.own.decided or cause
    # Set this limit first, because each of the next steps may block, for example on a full disk or a process that does
    # not end.
    host.watchdog.expect_end(_END_S, int(cause.exit_code))
    _show(cause, host.plan.name)
    host.publish(state=HostState.FAILED, decided=cause, endpoints=())
    write_failure(failure_file, cause)
    if host.pool is not None:
        # Nothing needs the batches of a failed job, so the endpoints get only half a second to finish.
        host.pool.stop(0.5)
    host.farewell()
    host.report(cause)
    return int(cause.exit_code)


def _show(cause: Cause, host: str) -> None:
    """Log a cause, and the lines of its detail that this host shows."""
    for line in (cause.first_line, *shown_detail(cause, host)):
        logger.error("%s", line)
