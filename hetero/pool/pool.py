"""Starts, watches, restarts and stops a host's endpoints. Runs in the launcher.

The launcher imports neither torch nor the user's script. A child process, the fork server (`hetero.pool.fork_server`),
imports them. One thread does the pool's work. It starts the fork server, reads events and the output of all processes,
and restarts crashed processes. The fork server ends with this thread (parent-death signal).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hetero.cache.folders import sweep_memory
from hetero.control.members.directory import BATCHES, EndpointRecord
from hetero.documents.text import counted
from hetero.errors import ChildFailedError, ChildFailure, HeteroError, first_line
from hetero.pool.figures import PoolFigures
from hetero.pool.slot import LAST_LINES, Liveness, RestartBudget, Slot
from hetero.pool.spawn import ForkServer, Outputs, PoolOptions, ProcessStarter, failure_from_event
from hetero.system.memory import keep_freed_memory
from hetero.system.process import describe_exit_status, wait_gone
from hetero.system.waits import POLL_S, backoff_s
from hetero.wire.channels import join_address

__all__ = ["EndpointPool", "PoolOptions"]

_RETURN_STABLE_TIMES = 60
"""A restart is given back after this number times ``stable_s`` seconds without a crash. By default this is an hour."""

logger = logging.getLogger(__name__)


class EndpointPool(PoolFigures):
    """Keeps a host's endpoints alive. Thread-safe context manager.

    Args:
        options: The pool's settings.
        on_change: Called from the pool's thread with the endpoints that serve, whenever they change.
        on_line: Called from the pool's thread with a process's name and a line that the process printed.
    """

    def __init__(
        self,
        options: PoolOptions,
        on_change: Callable[[tuple[EndpointRecord, ...]], None],
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self._options = options
        self._host = options.endpoint.host
        self._on_change = on_change
        self._on_line = on_line or (lambda name, text: logger.info("%s: %s", name, text))
        make_liveness = functools.partial(Liveness, bound_s=options.stuck_s, build_bound_s=options.prepare_timeout_s)
        self._slots = [
            Slot(index, f"{options.endpoint.host}/{self._name_on_host(index)}", make_liveness)
            for index in range(options.endpoint.num_endpoints)
        ]
        self._num_wanted = len(self._slots) if options.num_at_start is None else options.num_at_start
        """Number of slots, from the first, that should have a process now."""
        self.records: tuple[EndpointRecord, ...] = ()
        self._changed = threading.Condition()
        self.failure: HeteroError | None = None
        self.num_restarts = 0
        return_s = _RETURN_STABLE_TIMES * options.stable_s
        self._restart_budget = RestartBudget(options.endpoint_restarts, return_s)
        self.num_stuck = 0
        # The first part of each incarnation. It shows readers that a host was replaced, even if they missed the change.
        self._launch = secrets.token_hex(8)
        self._has_served = False
        """Whether all wanted endpoints have served at the same time."""
        self._stop_grace_s: float | None = None
        self._wake_read, self._wake_write = -1, -1
        self._thread: threading.Thread | None = None
        # Only the pool's thread uses the fields below. The starter starts the endpoints.
        self._starter: ProcessStarter | None = None
        self._starter_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._num_starter_crashes = 0
        self._starter_due_s: float | None = 0.0
        """Monotonic time to start the starter, 0 for at once. None if it runs, or if no start is planned."""
        self._starter_awaits_restart = False
        """Whether the starter ended when no restart was left. It waits until the budget allows another one."""
        self._selector = selectors.DefaultSelector()
        self._outputs = Outputs(self._selector, self._on_line)

    # For other threads

    def start(self) -> None:
        """Start the processes. Does not wait for them: see `wait_ready`.

        If no endpoints are wanted at the start, the fork server starts when the first one is wanted.
        """
        if self._thread is not None:
            raise RuntimeError("the pool was started already")
        # Call this before the thread below starts, because a thread that has allocated memory keeps its own arena of
        # malloc. If this process is a trainer, its readers start after this, and share one arena.
        keep_freed_memory()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        self._thread = threading.Thread(target=self._run, name="endpoint-pool", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until every endpoint serves, at most ``timeout_s`` seconds. Return whether all serve.

        Raises:
            HeteroError: The pool has given up. The error is `failure`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(self.records) == self._num_wanted, timeout_s)
            if self.failure is not None:
                raise self.failure
            return len(self.records) == self._num_wanted

    def resize(self, number: int) -> None:
        """Set the number of endpoints, at most ``options.endpoint.num_endpoints``. Does not wait.

        Additional endpoints are started. An endpoint that is not wanted leaves the directory, answers the requests that
        it has accepted, and ends. It may be wanted again when it has ended.
        """
        with self._changed:
            self._num_wanted = number
        self._wake()

    def describe(self) -> str:
        """Return what this host serves once it is ready, for example ``2 endpoints``."""
        return counted(self._options.endpoint.num_endpoints, "endpoint")

    def follow(self, records: Sequence[EndpointRecord]) -> None:
        """Receive the endpoints that serve in the job, on all hosts. This class does not need them."""

    def stop(self, grace_s: float | None = None) -> None:
        """Remove the endpoints from the directory, let them finish, and end every process. Blocks. Idempotent.

        Args:
            grace_s: Seconds for calls in flight, ``options.endpoint.grace_s`` by default. 0 kills at once.
        """
        if self._thread is None:
            return
        with self._changed:
            self._stop_grace_s = self._options.endpoint.grace_s if grace_s is None else grace_s
        self._wake()
        # After the grace, the thread may wait 3 s in `_shut_down` and 2 s in `_drop_starter`. On a busy host it needs
        # longer, but it must not block the caller for ever.
        self._thread.join(self._stop_grace_s + 15.0)

    def __enter__(self) -> EndpointPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wake(self) -> None:
        """Wake the pool's thread, unless it has ended."""
        with self._changed, contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
            if self._wake_write >= 0:
                os.write(self._wake_write, b"w")

    def _name_on_host(self, index: int) -> str:
        """Return the slot's name on its host."""
        return str(index)

    def _kind(self, index: int) -> str:
        """Return the kind of service that a slot's process offers."""
        return BATCHES

    def _may_start(self, slot: Slot) -> bool:
        """Return whether the slot's process can start now."""
        return True

    def _make_starter(self, output: int) -> ProcessStarter:
        return ForkServer(self._options, output)

    # The pool's thread

    def _run(self) -> None:
        """Start, watch and restart the processes until `stop` is called, then end them. Runs in the pool's thread."""
        try:
            while self._stop_grace_s is None:
                self._end_what_is_not_wanted()
                self._end_idle_starter()
                self._start_what_is_due()
                self._handle_events(POLL_S)
            self._shut_down(self._stop_grace_s)
        except BaseException as error:
            logger.exception("the endpoint pool failed")
            self._fail(error if isinstance(error, HeteroError) else HeteroError(f"the endpoint pool failed: {error}"))
        finally:
            self._drop_starter()
            self._outputs.close()
            # The endpoints have ended, so remove the samples that they kept in memory.
            sweep_memory()
            with self._changed:
                self._selector.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1
                self._changed.notify_all()

    def _handle_events(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for events and output, and handle them. Also handle stuck endpoints."""
        # Take the time before reading. If this process is suspended after reading, later beats are still unread, and
        # must not count as missing.
        begin_s = time.monotonic()
        for key, _ in self._selector.select(timeout_s):
            if key.data == "wake":
                os.read(self._wake_read, 64)  # otherwise the next `select` would return at once
            elif key.data == "starter":
                if self._starter is not None:
                    self._take_events(self._starter)
            else:
                self._outputs.read(key.data)
        # While the pool stops, the grace period bounds how long an endpoint may take.
        if self._stop_grace_s is None:
            for slot in self._slots:
                slot.check_liveness(begin_s)
        status = None if self._starter is None else self._starter.poll()
        if status is not None:
            self._on_starter_exit(status)

    def _start_what_is_due(self) -> None:
        """Start the fork server, or the endpoints whose time to start has come."""
        now_s = time.monotonic()
        if self._starter is None:
            # If no restart was left when the fork server ended, start it once the budget allows another restart.
            if self._starter_awaits_restart and self._take_restart():
                self._starter_awaits_restart, self._starter_due_s = False, now_s
                logger.warning("%s starts its endpoints again, because a restart was given back", self._host)
            is_due = self._starter_due_s is not None and now_s >= self._starter_due_s
            if is_due and self._num_wanted:
                self._starter_due_s = None
                with self._outputs.open(f"{self._host}/script", self._starter_lines) as write_end:
                    self._starter = self._make_starter(write_end)
                self._selector.register(self._starter, selectors.EVENT_READ, "starter")
        # The fork server starts endpoints only after it has imported the script.
        elif self._starter.loaded_s is not None:
            for slot in self._slots[: self._num_wanted]:
                if slot.awaits_restart and self._take_restart():
                    slot.awaits_restart, slot.start_at_s = False, now_s
                    logger.warning("endpoint %s is started again, because a restart was given back", slot.name)
                # A worker of tf.data.service may start only when the dispatcher's address is known.
                if slot.start_at_s is not None and now_s >= slot.start_at_s and self._may_start(slot):
                    slot.begin(f"{self._launch}-{secrets.token_hex(16)}")
                    with self._outputs.open(slot.name, slot.last_lines) as write_end:
                        self._starter.start_endpoint(slot.index, slot.incarnation, write_end)

    def _end_what_is_not_wanted(self) -> None:
        """Remove endpoints that are not wanted from the directory. End them when they have answered their requests."""
        now_s = time.monotonic()
        for slot in self._slots[self._num_wanted :]:
            if slot.is_started and slot.leaving_s is None:
                slot.leave(now_s)
                self._publish()
        # An endpoint that left must end even if it is wanted again. Then it starts anew.
        for slot in self._slots:
            if self._starter is not None and slot.may_end(now_s):
                slot.was_asked_to_end = True
                self._starter.end_endpoint(slot.incarnation)

    def _end_idle_starter(self) -> None:
        """End the fork server if no endpoint is wanted or left, to free the memory of the libraries in it."""
        # While the fork server imports the script, do not end it, because an import may write files.
        has_loaded = self._starter is not None and self._starter.loaded_s is not None
        if has_loaded and not self._num_wanted and not any(slot.is_started for slot in self._slots):
            self._drop_starter()
            self._starter_due_s = 0.0  # it starts again as soon as an endpoint is wanted

    def _take_events(self, starter: ProcessStarter) -> None:
        """Act on the events that have arrived from the fork server and its endpoints."""
        for event in starter.events():
            if event["event"] != "gone":
                self._on_event(starter, event)
            elif self._is_registered(starter):
                # The other end is gone. Stop watching the descriptor, which stays readable. `poll` reports the exit.
                self._selector.unregister(starter)

    def _is_registered(self, starter: ProcessStarter) -> bool:
        return starter.fileno() in self._selector.get_map()

    def _on_event(self, starter: ProcessStarter, event: dict[str, Any]) -> None:
        """Act on an event of the fork server or of an endpoint. `hetero.pool.fork_server` sends them."""
        kind = event.pop("event")
        if kind == "loaded":
            starter.loaded_s = time.monotonic()
            logger.debug("%s has imported the script, endpoints by %s", self._host, event["mode"])
            return
        if kind == "failed":
            self._fail(failure_from_event(event))
            return
        slot = self._slots[event["index"]]
        # Ignore an event of a process that has already been replaced.
        if event["incarnation"] != slot.incarnation:
            return
        if kind == "ready":
            # A builder (`hetero.pool.builder`) may have replaced the endpoint by one that it has forked with the same
            # incarnation. So keep the statistics of the earlier process.
            slot.fold_statistics()
            self._on_ready(slot, event["pid"], event["port"])
        elif kind == "statistics":
            with self._changed:
                figures = {name: event[name] for name in event if name not in ("index", "incarnation")}
                slot.report(figures, time.monotonic())
        elif kind == "build":
            slot.liveness.build(time.monotonic(), has_ended=event["has_ended"])
        elif kind == "exited":
            self._on_exit(slot, event["status"])

    def _on_ready(self, slot: Slot, pid: int, port: int) -> None:
        """Record that an endpoint serves, and publish it, unless it is about to leave."""
        options = self._options.endpoint
        slot.ready_s = time.monotonic()
        slot.liveness.beat(slot.ready_s)
        with self._changed:
            slot.pid = pid
        if slot.leaving_s is not None:
            return
        slot.record = EndpointRecord(
            endpoint_id=slot.name,
            host=options.host,
            address=join_address(options.address, port),
            incarnation=slot.incarnation,
            num_slots=options.num_slots,
            kind=self._kind(slot.index),
            is_optional=self._options.num_at_start is not None,  # see `PoolOptions.num_at_start`
        )
        self._publish()

    def _on_exit(self, slot: Slot, status: int) -> None:
        """Plan a restart of an endpoint that ended, or give up.

        Args:
            slot: The endpoint.
            status: Exit status of its process.
        """
        # Read the last lines of the process now, because the error about its exit shows them.
        self._outputs.drain(slot.name)
        is_leaving = slot.leaving_s is not None
        self._retire(slot)
        if is_leaving:
            # The endpoint may start at once when it is wanted again.
            slot.start_at_s = 0.0
            return
        self._publish()
        if self.failure is not None or self._stop_grace_s is not None:
            return
        explanation = describe_exit_status(status)
        if (stuck_for_s := slot.liveness.stuck_for_s) is not None:
            explanation = f"was stuck for {stuck_for_s:.0f} s and was killed"
            with self._changed:
                self.num_stuck += 1
        wanted = self._slots[: self._num_wanted]
        # An endpoint that is starting counts too, because the pool must not give up before it serves.
        is_last = not any(other.is_started or other.start_at_s is not None for other in wanted)
        slot.start_at_s = self._time_to_restart(
            slot.name, status, explanation, slot.last_lines, num_crashes=slot.num_crashes + 1, is_last=is_last
        )
        # Without a time to start, the endpoint waits until the budget gets a restart back. This wait is longer than any
        # back-off. So do not count the crash, because it would also lengthen the next back-off.
        slot.awaits_restart = slot.start_at_s is None and self.failure is None
        slot.num_crashes += slot.start_at_s is not None

    def _on_starter_exit(self, status: int) -> None:
        """Plan a restart of the fork server, which has ended with all endpoints of this host, or give up."""
        if self._starter is not None:
            # Read the events that the fork server sent before it ended.
            self._take_events(self._starter)
            if self._is_stable(self._starter.loaded_s):
                self._num_starter_crashes = 0
        self._drop_starter()
        for slot in self._slots:
            self._retire(slot)
            slot.awaits_restart, slot.start_at_s = False, 0.0  # it starts when the next fork server has loaded
        self._publish()
        if self.failure is not None or self._stop_grace_s is not None:
            return
        name = f"the process that imports {self._options.endpoint.script!r}"
        self._starter_due_s = self._time_to_restart(
            name,
            status,
            describe_exit_status(status),
            self._starter_lines,
            num_crashes=self._num_starter_crashes + 1,
            is_last=True,  # because no endpoint lives without the fork server
        )
        self._starter_awaits_restart = self._starter_due_s is None and self.failure is None
        self._num_starter_crashes += self._starter_due_s is not None  # as in `_on_exit`

    def _time_to_restart(
        self, name: str, status: int, explanation: str, lines: deque[str], *, num_crashes: int, is_last: bool
    ) -> float | None:
        """Return when to start an ended process again. None if no restart is left.

        If the process was the last one, and the host may not wait for another restart, the pool gives up.
        ``num_crashes`` counts the crashes in a row, this one included. ``lines`` are the last lines of the output.
        """
        now_s = time.monotonic()
        if self._take_restart():
            wait_s = backoff_s(num_crashes)
            logger.warning("%s: %s %s; starting it again in %.1f s", self._host, name, explanation, wait_s)
            return now_s + wait_s
        if is_last and not self._may_wait():
            failure = ChildFailure(name=name, exit_status=status, explanation=explanation, last_lines=tuple(lines))
            self._fail(ChildFailedError(failure))
        else:  # when a restart is given back, `_start_what_is_due` starts the process
            when = self._restart_budget.next_in_words(now_s)
            logger.error("%s: %s %s; no restarts are left%s", self._host, name, explanation, when)
        return None

    def _take_restart(self) -> bool:
        """Use one restart of the budget, and count it. Return whether one was left."""
        if not self._restart_budget.take(time.monotonic()):
            return False
        with self._changed:
            self.num_restarts += 1
        return True

    def _may_wait(self) -> bool:
        """Return whether this host may wait without endpoints until the budget allows another restart."""
        # A host that never served gives up at once, because the job must show such a fault.
        return self._has_served and not self._options.gives_up and self._restart_budget.next_s < math.inf

    def _is_stable(self, since_s: float | None) -> bool:
        """Return whether a process has worked since ``since_s`` for long enough, False if it never has."""
        return since_s is not None and time.monotonic() - since_s >= self._options.stable_s

    def _retire(self, slot: Slot) -> None:
        """Record that the process of a slot has ended."""
        # After a stable time, forget earlier crashes. Otherwise, an endpoint that crashes a few times within weeks
        # would come back after 10 s instead of at once.
        if self._is_stable(slot.ready_s):
            slot.num_crashes = 0
        with self._changed:
            slot.retire()

    def _publish(self) -> None:
        """Report the endpoints that serve now, if they have changed."""
        records = tuple(slot.record for slot in self._slots if slot.record is not None)
        if self._stop_grace_s is not None:
            records = ()
        with self._changed:
            if records == self.records:
                return
            self.records = records
            self._has_served |= len(records) == self._num_wanted
            self._changed.notify_all()
        # Call this without the lock, because the function may call methods of the pool.
        self._on_change(records)

    def _fail(self, error: HeteroError) -> None:
        """Give up for good: keep the first error, and plan no further starts."""
        if self.failure is None:
            # A job that needs endpoints at its start (``num_at_start`` is not 0) ends now. Its launcher logs the whole
            # error, so log one line here.
            ends_job = not self._has_served and self._options.num_at_start != 0
            shown = first_line(error) if ends_job else error
            logger.error("hetero gives up the endpoints of %s: %s", self._host, shown)
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._starter_awaits_restart = False
            self._starter_due_s = None
            for slot in self._slots:
                slot.awaits_restart, slot.start_at_s = False, None
            self._changed.notify_all()

    def _shut_down(self, grace_s: float) -> None:
        """Remove the endpoints from the directory, and end them within the grace period."""
        # Remove the endpoints from the directory first, because readers must send no more requests.
        self._publish()
        # If the fork server is still importing the script, it has no endpoints, and it would read the request to stop
        # only after the import. This would delay the end of a short job. So `_run` kills it.
        starter = self._starter
        if starter is None or starter.loaded_s is None:
            return
        starter.stop(grace_s)
        # The fork server kills its endpoints after the grace, and needs a moment to end. `_run` kills what is left.
        deadline_s = time.monotonic() + grace_s + 3.0
        while self._starter is not None and time.monotonic() < deadline_s:
            self._handle_events(0.1)

    def _drop_starter(self) -> None:
        """End the fork server if it lives, and wait until its children are gone."""
        if self._starter is None:
            return
        if self._is_registered(self._starter):
            self._selector.unregister(self._starter)
        self._starter.end()
        self._starter = None
        # The kernel kills the endpoints after the fork server. Wait for this, because the host must not go on before
        # the endpoints are gone.
        wait_gone([slot.pid for slot in self._slots if slot.pid], timeout_s=2.0)
