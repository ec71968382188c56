"""Submit a job, and submit it again while SageMaker lacks instances for it."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero.errors import CapacityError, ConfigError, ExitCode
from hetero.launch.failure import stated_code
from hetero.sagemaker.limits import limits
from hetero.sagemaker.recording import CLIENT_LOCK, record, sdk_version
from hetero.sagemaker.submission.shortages import shortage_in

__all__ = ["FIRST_WAIT_S", "Submission", "failure_code", "follow", "submit", "with_end"]

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 60.0
"""Seconds before the second attempt. While a job runs, waits are shorter."""
_POLL_S = 10.0
_PATIENCE_S = 600.0
"""Longest wait between two attempts, and longest time without a response of the service. After that `submit` stops
following the job, which continues."""
_ENDED = ("Completed", "Failed", "Stopped")
_WITHOUT_HOSTS = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack")
"""Values of SecondaryStatus of a job that does not have its instances yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A submitted job, in the last state that the service reported to `submit`."""

    job_name: str
    status: str
    """``InProgress``, ``Completed``, ``Failed`` or ``Stopped``."""
    failure: str
    """The service's FailureReason. Empty if the service states no reason."""
    num_attempts: int

    @property
    def exit_code(self) -> int:
        """Exit code of the job.

        It is 0 if the job completed or is in progress. For a failed job, it is the `ExitCode` of the failure. For a
        stopped job, it is 128 + SIGTERM.
        """
        if self.status in ("InProgress", "Completed"):
            return int(ExitCode.OK)
        return 128 + signal.SIGTERM if self.status == "Stopped" else failure_code(self.failure)


def submit(
    estimator: Any,
    inputs: Any = None,
    *,
    job_name: str | None = None,
    wait: bool = True,
    max_attempts: int = 5,
    first_wait_s: float = FIRST_WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
    on_submit: Callable[[str], object] | None = None,
) -> Submission:
    """Start the job of an estimator, and start it again if SageMaker lacks instances for it.

    The call blocks until the job has ended or, without ``wait``, until the job has its instances. After a shortage, it
    logs one line per instance type. It waits ``first_wait_s`` before the second attempt, and doubles the wait before
    each further attempt, up to ten minutes.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3, with a session that has an account.
        inputs: The inputs that its ``fit`` or ``train`` takes.
        job_name: Name of the job in the first attempt. Further attempts append ``-2``, ``-3`` and so on, because names
            must be unique. SDK 3 ignores the name and makes its own names.
        wait: Whether to block until the job has ended instead of until it has its instances.
        max_attempts: Maximum number of attempts, >= 1.
        first_wait_s: Seconds to wait before the second attempt.
        sleep: Function that waits a number of seconds.
        on_submit: Called with the name of each job that was submitted, before its end is known.

    Raises:
        ConfigError: If the object is not an estimator, or ``max_attempts`` is out of range.
        CapacityError: If SageMaker lacks instances after the last attempt, or waiting cannot help.
        Exception: Any exception of the SDK or botocore that is not due to a shortage.
    """
    if max_attempts < 1:
        raise ConfigError(f"max_attempts is {max_attempts}; expected 1 or more")
    request = record(estimator, inputs).request
    wait_s = first_wait_s
    for attempt in range(1, max_attempts + 1):
        name = job_name if attempt == 1 or job_name is None else with_end(job_name, f"-{attempt}")
        # SageMaker may reject the job at once, because it exceeds a quota.
        try:
            name = _start(estimator, inputs, name)
        except Exception as error:
            shortage = shortage_in(_words(error), request)
            if shortage is None:
                raise
        else:
            logger.info("submitted %s", name)
            if on_submit is not None:
                on_submit(name)
            description = follow(estimator.sagemaker_session.sagemaker_client, name, wait=wait, sleep=sleep)
            # A job without instances fails minutes after it was accepted, and costs nothing.
            status, failure = description["TrainingJobStatus"], description.get("FailureReason", "")
            shortage = shortage_in(failure, request) if status == "Failed" else None
            if shortage is None:
                return Submission(job_name=name, status=status, failure=failure, num_attempts=attempt)
        # SageMaker lacks instances. Log this, then wait or raise.
        for line in shortage.lines(request):
            logger.warning("%s", line)
        if shortage.is_final or attempt == max_attempts:
            advice = "request a larger quota from Service Quotas" if shortage.is_final else "try again later"
            lines = [f"no instances for the job, after {attempt} of at most {max_attempts} attempts"]
            lines += shortage.lines(request)
            lines.append(f"to do: {advice}, or change the group's instance type or the job's region")
            raise CapacityError("\n  ".join(lines))
        logger.warning("attempt %d of %d starts in %.0f s", attempt + 1, max_attempts, wait_s)
        sleep(wait_s)
        wait_s = min(2 * wait_s, _PATIENCE_S)
    raise AssertionError("not reached")


def with_end(job_name: str, end: str) -> str:
    """Return a job's name with an end, cut before the end to the maximum length of a name."""
    most = limits()["TrainingJobName"].high
    assert most is not None
    return job_name[: most - len(end)].strip("-") + end


def failure_code(failure: str) -> int:
    """Return the exit code in a failure's text (``HET-31 ...``). Without one, return the code of a failed script.

    Platforms keep only the text of a failure, not its exit code.
    """
    stated = stated_code(failure)
    return int(ExitCode.SCRIPT_FAILED) if stated is None else stated


def _start(estimator: Any, inputs: Any, job_name: str | None) -> str:
    """Submit the job once and return its name. SDK 3 ignores ``job_name``. `follow` waits for the job."""
    if sdk_version(estimator) == 2:
        estimator.fit(inputs, wait=False, logs=False, job_name=job_name)
        return str(estimator.latest_training_job.name)
    # The job must not go to the offline client that a recording in another thread has put in place for a moment.
    with CLIENT_LOCK:
        estimator.train(inputs, wait=False, logs=False)
    return str(estimator._latest_training_job.training_job_name)


def _words(error: Exception) -> str:
    """Return the code and the message of a botocore error. Empty for other errors."""
    response = getattr(error, "response", None)
    detail = response.get("Error", {}) if isinstance(response, Mapping) else {}
    return f"{detail['Code']}: {detail.get('Message', '')}" if "Code" in detail else ""


def follow(
    client: Any,
    job_name: str,
    *,
    wait: bool = True,
    sleep: Callable[[float], None] = time.sleep,
    on_description: Callable[[Mapping[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Wait until a job has ended or, without ``wait``, until it has its instances. Return its description.

    Args:
        client: boto3's client for ``sagemaker``.
        job_name: Name of the job.
        wait: Whether to wait until the job has ended.
        sleep: Function that waits a number of seconds.
        on_description: Called with each description of the job.

    Raises:
        Exception: If the service does not answer for ten minutes.
    """
    logged_stage, silent_s = "", 0.0
    while True:
        asked_s = time.monotonic()
        try:
            description: dict[str, Any] = client.describe_training_job(TrainingJobName=job_name)
        except Exception as error:
            # The job was submitted and continues, so errors of some minutes must not end the wait for the job.
            silent_s += time.monotonic() - asked_s
            if silent_s >= _PATIENCE_S:
                logger.error("cannot read the state of %s any longer. The job was submitted and continues", job_name)
                raise
            logger.warning("cannot read the state of %s, trying again: %s", job_name, _words(error) or error)
            sleep(_POLL_S)
            silent_s += _POLL_S
            continue
        silent_s = 0.0
        on_description(description)
        stage = description.get("SecondaryStatus", "")
        if stage != logged_stage:
            logged_stage = stage
            logger.info("%s: %s", job_name, stage)
        has_hosts = stage not in _WITHOUT_HOSTS
        if description["TrainingJobStatus"] in _ENDED or (has_hosts and not wait):
            return description
        sleep(_POLL_S)
