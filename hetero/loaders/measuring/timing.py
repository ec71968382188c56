"""The step timer of one loader. It follows the job's options, reports to the launcher, and is shared by all passes.

This is a separate module because `hetero.tf.measured` also times loops over datasets that do not have a loader.
"""

from __future__ import annotations

from hetero.config.options import DEFAULT_WARMUP_STEPS
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.metrics.steps import StepTimer, check_name

__all__ = ["LoaderTiming"]


class LoaderTiming:
    """Measures step time and data wait of one loader.

    Args:
        name: Name in reports.

    Raises:
        ConfigError: If the name cannot be reported to the launcher.
    """

    can_be_profiled = False
    """Whether `hetero profile` measures loaders of this class."""

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        """Name in reports."""
        self._timer: StepTimer | None = None
        self._timed: object = None
        """Identifies the pass that is measured now, which is the one that began the last wait. None between passes."""

    @property
    def timer(self) -> StepTimer:
        """Timer of this loader's steps. The timer is made and registered on first use."""
        if self._timer is None:
            session = control.current()
            if session is not None and session.options.profile and not self.can_be_profiled:
                raise ConfigError(
                    f"loader {self.name} is one of hetero.tf.distribute, which hetero profile cannot measure\n"
                    "  Use hetero.tf.from_dataset, or run the job without --profile. hetero plan can use its report."
                )
            self._timer = self._make_timer()
            if session is not None:
                session.register_timer(self._timer)
        return self._timer

    def begin_wait(self, owner: object) -> StepTimer:
        """Begin a data wait of the pass that ``owner`` identifies."""
        self._timed = owner
        self.timer.begin_wait()
        return self.timer

    def await_step(self, owner: object) -> StepTimer:
        """Begin a data wait as `begin_wait` does. The job may end here.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        timer = self.begin_wait(owner)
        try:
            control.check_stop(timer)
        except BaseException:
            self.end_timing(owner)
            raise
        return timer

    def end_timing(self, owner: object) -> None:
        """Pause the timer if the pass of ``owner`` began the last wait. Else another pass is measured. Idempotent."""
        if self._timed is owner:
            self._timed = None
            self.timer.pause()

    def _make_timer(self) -> StepTimer:
        """Return a timer with the options of the job. In a process without a job, use the defaults."""
        session = control.current()
        options = None if session is None else session.options
        return StepTimer(
            self.name,
            warmup_steps=DEFAULT_WARMUP_STEPS if options is None else options.warmup_steps,
            step_wait_s=None if options is None else options.emulate_step_s,
            run_clock=None if session is None else session.metrics.elapsed_s,
        )
