"""What runs in a child process: a trainer that measures itself, or a server."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from harness import usage
from harness.trials import Competitor, Job, Run


def found_in(module: str, name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a maker, for `dispatch`, whose module is imported in its own process only."""
    return lambda config: getattr(importlib.import_module(module), name)(config)


def dispatch(
    competitors: Mapping[str, Callable[[Mapping[str, Any]], Competitor | Job]],
    servers: Mapping[str, Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]] | None = None,
) -> None:
    """Become a trainer or server process if the command line asks for one, and then do not return.

    Args:
        competitors: Classes of competitors or jobs. Trainer processes create them.
        servers: Context managers for server processes. Entering one returns the reply, or a function that makes the
            reply to every later request.
    """
    if len(sys.argv) != 5 or not sys.argv[1].startswith("--child-"):
        return
    role, name, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[3]), "w", encoding="utf-8") as replies:
        try:
            if role == "--child-trainer":
                competitor = competitors[name](config)
                (_be_driver if isinstance(competitor, Job) else _be_trainer)(competitor, replies)
            else:
                with (servers or {})[name](config) as facts:
                    _reply(replies, {} if callable(facts) else facts)
                    for _ in sys.stdin:  # until the parent is gone or has had enough
                        _reply(replies, facts() if callable(facts) else facts)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            with contextlib.suppress(OSError):
                _reply(replies, {"error": f"{type(error).__name__}: {error}"[:2000]})
            status = 1
        else:
            status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no benchmark measures frameworks' exit handlers


def _reply(replies: IO[str], content: Any) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


def _be_trainer(competitor: Competitor, replies: IO[str]) -> None:
    before_bytes = usage.resident_bytes()
    try:
        batches, first_batch_s = _first_batch(competitor)
        _reply(replies, {"first_batch_s": first_batch_s})
        for line in sys.stdin:
            command = json.loads(line)
            batches = iter(competitor.batches()) if batches is None else batches
            _warm_up(competitor, batches, command["warmup_batches"])
            competitor.begin_run()
            run = measure(competitor, batches, before_bytes, first_batch_s, command)
            if competitor.pauses:
                batches.close()
                batches = None
            _reply(replies, dataclasses.asdict(run))
    except BaseException:
        with contextlib.suppress(Exception):  # it may lack what it would stop: the parent is to be told the cause
            competitor.stop()
        raise
    competitor.stop()


def _be_driver(job: Job, replies: IO[str]) -> None:
    try:
        job.start()
        _reply(replies, {})
        for line in sys.stdin:
            _reply(replies, dataclasses.asdict(job.run(json.loads(line))))
    finally:
        job.stop()


def run_once(competitor: Competitor, command: Mapping[str, Any]) -> Run:
    """Feed this process from the start to the end of one run, and return what it took.

    The trainer process of a `Job` calls it. The harness's own trainer processes do the same by themselves.

    Args:
        competitor: What feeds this process.
        command: ``seconds``, ``warmup_batches`` and ``min_batches``, see `Protocol`.
    """
    before_bytes = usage.resident_bytes()
    try:
        batches, first_batch_s = _first_batch(competitor)
        _warm_up(competitor, batches, command["warmup_batches"])
        competitor.begin_run()
        return measure(competitor, batches, before_bytes, first_batch_s, command)
    finally:
        competitor.stop()


def _first_batch(competitor: Competitor) -> tuple[Any, float]:
    """Start, and consume the first batch. Return the iterator of the others, and the time that it took."""
    begin_s = time.perf_counter()
    competitor.start()
    batches = iter(competitor.batches())
    competitor.consume(next(batches))
    return batches, time.perf_counter() - begin_s


def _warm_up(competitor: Competitor, batches: Iterator[Any], num_batches: int) -> None:
    end_s = time.perf_counter() + competitor.min_warmup_s
    count = 0
    while count < num_batches or (num_batches and time.perf_counter() < end_s):
        competitor.consume(next(batches))
        count += 1


def measure(
    competitor: Competitor,
    batches: Iterator[Any],
    before_bytes: int,
    first_batch_s: float,
    command: Mapping[str, Any],
) -> Run:
    """Consume for ``command``'s ``seconds`` and ``min_batches``, and return what it took."""
    usage.reset_peak()
    num_batches = num_samples = num_bytes = 0
    supply_before_s, _ = usage.supply_usage()
    cpu_before_s = usage.own_cpu_s()
    begin_s = now_s = time.perf_counter()
    end_s = begin_s + command["seconds"]
    while now_s < end_s or num_batches < command["min_batches"]:
        samples, nbytes = competitor.consume(next(batches))
        num_batches += 1
        num_samples += samples
        num_bytes += nbytes
        now_s = time.perf_counter()
    cpu_s = usage.own_cpu_s() - cpu_before_s
    supply_s, supply_bytes = usage.supply_usage()
    peak_bytes = usage.peak_bytes()
    return Run(
        seconds=now_s - begin_s,
        num_batches=num_batches,
        num_samples=num_samples,
        num_bytes=num_bytes,
        trainer_cpu_s=cpu_s,
        supply_cpu_s=supply_s - supply_before_s,
        trainer_peak_bytes=peak_bytes,
        trainer_growth_bytes=peak_bytes - before_bytes,
        supply_bytes=supply_bytes,
        first_batch_s=first_batch_s,
        facts=competitor.facts(),
    )
