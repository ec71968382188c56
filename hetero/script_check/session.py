"""The session of a script that is checked: this process starts the endpoints itself, without a launcher."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetero.control.members.directory import Directory
from hetero.control.rank.session import RankSession
from hetero.control.security import Token, token_memfd
from hetero.control.status import SessionOptions
from hetero.endpoint.options import EndpointOptions
from hetero.errors import ConfigError, ExitCode
from hetero.metrics.logged import MetricLog
from hetero.metrics.steps import StepTimer
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.wire.limits import Limits

__all__ = ["CheckSession"]

_HOST = "data-host"
_NUM_ENDPOINTS = 2
"""Two endpoints, because a batch that depends on the process that computes it differs between two processes."""
_PASS_BATCHES = 3
"""Batches of a pass: the first two, and the last one, which a data set that must be read in order cannot make."""
_PASSES = 10
"""Passes of one loader before the script is ended. A change that the loop makes after some epochs shows in the next
pass."""


class CheckSession(RankSession):
    """Makes this process the only rank of a job with data hosts.

    Args:
        script: Path of the script, or the name of a module.
        arguments: The script's command line after its name.
        is_module: Whether ``script`` is the name of a module.
        folder: Empty folder that the endpoints run in.
        seconds: Longest wait for a batch, and for the endpoints.
        on_line: Called with the name of an endpoint and a line that it has printed.

    Raises:
        HeteroError: If the endpoints cannot import the script.
    """

    def __init__(
        self,
        script: str,
        arguments: tuple[str, ...],
        *,
        is_module: bool,
        folder: Path,
        seconds: float,
        on_line: Callable[[str, str], None],
    ) -> None:
        # The base class's __init__ is not called, because it connects to a launcher.
        self.rank, self.world_size, self.generation = 0, 1, 0
        # Loaders get their batches from endpoints, as in a job with data hosts.
        self.remote = True
        self.token = Token.generate()
        self.job_id = f"check-{os.getpid()}"
        self.tls = None
        self.directory, self.tf_servers = Directory(), Directory()
        self.stopped, self.stop_failure, self.hidden_error = False, None, None
        self.metrics = MetricLog(rank=0)
        self.options = SessionOptions(
            data_timeout_s=seconds,
            prepare_timeout_s=seconds,
            emulate_step_s=None,
            # Every batch is computed twice, not only the first ones.
            purity_checks=2**31,
            warmup_steps=0,
            max_batch_bytes=Limits().max_batch_bytes,
            data_service="grpc",
            max_pass_batches=_PASS_BATCHES,
        )
        self._num_steps: collections.Counter[int] = collections.Counter()
        # Nothing is counted until a loader calls `set_counters`.
        self._counters: Callable[[], Mapping[str, int]] = dict
        self._descriptor, token_path = token_memfd(self.token)
        endpoint = EndpointOptions(
            script=script if is_module else str(Path(script).resolve()),
            is_module=is_module,
            script_args=arguments,
            host=_HOST,
            address="127.0.0.1",
            num_endpoints=_NUM_ENDPOINTS,
            job_id=self.job_id,
            log_level="WARNING",
            compares_shards=True,
        )
        # The endpoints stay in the process group of the check, because `check_script` kills the whole group.
        self._pool = EndpointPool(
            PoolOptions(endpoint=endpoint, token_path=token_path, in_own_session=False), self.directory.replace, on_line
        )
        # Start the endpoints in another folder, as on a data host. They keep the folder of their start.
        here = Path.cwd()
        os.chdir(folder)
        # Python finds the script's module in `here`, so let the endpoints search `here` too.
        if is_module:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH", ""))))
        try:
            self._pool.start()
            if not self._pool.wait_ready(seconds):
                raise ConfigError(
                    f"importing the script takes longer than {seconds:.0f} s\n"
                    '  Data hosts import it too. Put what takes long under if __name__ == "__main__":, or into the '
                    "function with @hetero.dataset."
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.chdir(here)

    def register_timer(self, timer: StepTimer) -> None:
        """Do nothing, because nothing is reported."""

    def set_counters(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Keep the function that counts what the endpoints have delivered."""
        self._counters = counters

    @property
    def num_batches(self) -> int:
        """Batches that the script has received."""
        return self._counters().get("batches", 0)

    @property
    def may_have_shortened(self) -> bool:
        """Whether a pass may have ended early because of the check."""
        return self.num_batches >= _PASS_BATCHES

    def set_profile(self, profile: Callable[[bool], bytes]) -> None:
        """Do nothing, because nothing is reported."""

    def fail(self, summary: str, detail: str, exit_code: ExitCode, *, is_consequence: bool = False) -> None:
        """Do nothing, because nothing is reported."""

    def check_stop(self, timer: StepTimer) -> None:
        """End the script if a loader has had enough passes.

        Raises:
            SystemExit: To end the script. Stop callbacks do not run, because they would write checkpoints.
        """
        # Each loader has its own timer.
        self._num_steps[id(timer)] += 1
        # The loader calls this method before each batch, and once more before it finds the end of the pass.
        if self._num_steps[id(timer)] > _PASSES * (_PASS_BATCHES + 1):
            raise SystemExit(0)

    def must_end_wait(self, is_starved: bool) -> bool:
        """Return False, because the process ends when the time of the script is over."""
        return False

    def take_late_stops(self) -> None:
        """Do nothing, because no signal stops the script."""

    def close(self, *, finished: bool = True) -> bool:
        """End the endpoints."""
        self._pool.stop(grace_s=0.0)
        return True

    def end(self) -> Any:
        """End the script.

        Raises:
            SystemExit: Always.
        """
        raise SystemExit(0)
