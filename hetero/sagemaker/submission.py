"""Submit a job, and submit it again while SageMaker lacks instances for it.

SageMaker reports two kinds of shortage. If the job exceeds the account's quota of an instance type, the call itself
fails (``ResourceLimitExceeded``). Waiting then helps only if other jobs use up the quota. If the instances themselves
are missing, the job fails minutes later, before it has begun. Its FailureReason has ``CapacityError`` or
``InsufficientCapacity...``, and the job costs nothing.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero.errors import CapacityError, ConfigError, ExitCode
from hetero.launch.failure import stated_code
from hetero.sagemaker.recording import record, sdk_version
from hetero.sagemaker.request import TrainingRequest

__all__ = ["Shortage", "Submission", "failure_code", "shortage_in", "submit"]

logger = logging.getLogger(__name__)

_POLL_S = 10.0
_LONGEST_WAIT_S = 900.0
_LONGEST_SILENCE_S = 600.0
"""Seconds without an answer from the service until `submit` stops following a job. The job itself continues."""
_ENDED = ("Completed", "Failed", "Stopped")
_WITHOUT_HOSTS = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack")
"""Values of SecondaryStatus before a job gets its instances."""
_KIND = re.compile(r"\b(ResourceLimitExceeded|CapacityError|InsufficientCapacity\w*|InsufficientInstanceCapacity)\b")
_TYPE = re.compile(r"\bml\.[a-z0-9-]+\.[a-z0-9]+\b")
_QUOTA = re.compile(
    r"is (?P<limit>\d+) Instances, with current utilization of (?P<used>\d+) Instances "
    r"and a request delta of (?P<delta>\d+) Instances"
)
_OF_THE_SCRIPT = "AlgorithmError"
"""Prefix of the FailureReason of a job that began.

The text after it comes from the script and may quote an error of any service that the script calls.
"""
_LONGEST_NAME = 63
"""Maximum number of characters in a job's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The instances that a job did not get."""

    kind: str
    """The service's name for the shortage, such as ``CapacityError`` or ``ResourceLimitExceeded``."""
    instance_types: tuple[str, ...]
    """The instance types that are short. All types of the job if the service does not name them."""
    why: str
    is_final: bool
    """Whether waiting cannot help, because the job needs more than the account's quota."""

    def lines(self, request: TrainingRequest) -> list[str]:
        """Return one line per instance type, with the number that the job needs, the groups, and the reason."""
        found = []
        for kind in self.instance_types:
            groups = [group for group in request.groups if group.instance_type == kind]
            wanted = f"{sum(group.count for group in groups)} for {', '.join(group.name for group in groups)}"
            found.append(f"{kind} ({wanted}): {self.kind}: {self.why}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A submitted job, in the last state that `submit` saw."""

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
    first_wait_s: float = 60.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Submission:
    """Start the job of an estimator, and start it again if SageMaker lacks instances for it.

    The call blocks until the job has ended or, without ``wait``, until it has its instances. After a shortage, the call
    logs one line per instance type. It waits ``first_wait_s`` before the second attempt, and doubles the wait before
    each further attempt, up to 15 minutes.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3, with a session that has an account.
        inputs: The inputs that its ``fit`` or ``train`` takes.
        job_name: Name of the job in the first attempt. Further attempts append ``-2``, ``-3`` and so on, because names
            are unique. SDK 3 ignores it and makes its own names.
        wait: Whether to block until the job has ended instead of until it has its instances.
        max_attempts: Maximum number of attempts, >= 1.
        first_wait_s: Seconds to wait before the second attempt.
        sleep: Function that waits a number of seconds.

    Raises:
        ConfigError: If the object is not an estimator, or ``max_attempts`` is out of range.
        CapacityError: If SageMaker lacks instances after the last attempt, or waiting cannot help.
        Exception: If the SDK or botocore raises it for another reason.
    """
    if max_attempts < 1:
        raise ConfigError(f"max_attempts is {max_attempts}; expected 1 or more")
    request = record(estimator, inputs).request
    wait_s = first_wait_s
    for attempt in range(1, max_attempts + 1):
        name = job_name if attempt == 1 or job_name is None else _numbered(job_name, attempt)
        outcome = _attempt(estimator, inputs, name, request=request, number=attempt, wait=wait, sleep=sleep)
        if isinstance(outcome, Submission):
            return outcome
        # The attempt met a shortage: log it, then wait or raise.
        for line in outcome.lines(request):
            logger.warning("%s", line)
        if outcome.is_final or attempt == max_attempts:
            raise _given_up(outcome, request, f"after {attempt} of at most {max_attempts} attempts")
        logger.warning("attempt %d of %d follows in %.0f s", attempt + 1, max_attempts, wait_s)
        sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    raise AssertionError("not reached")


def _numbered(job_name: str, attempt: int) -> str:
    """Return the name of a further attempt, cut to the maximum length of a name."""
    end = f"-{attempt}"
    return job_name[: _LONGEST_NAME - len(end)].rstrip("-") + end


def _given_up(shortage: Shortage, request: TrainingRequest, when: str) -> CapacityError:
    advice = "ask for a larger quota (Service Quotas)" if shortage.is_final else "try later"
    lines = [f"no instances for the job, {when}", *shortage.lines(request)]
    lines.append(f"to do: {advice}, or give the group another instance type or the job another region")
    return CapacityError("\n  ".join(lines))


def _attempt(
    estimator: Any,
    inputs: Any,
    job_name: str | None,
    *,
    request: TrainingRequest,
    number: int,
    wait: bool,
    sleep: Callable[[float], None],
) -> Submission | Shortage:
    try:
        name = _start(estimator, inputs, job_name)
    except Exception as error:
        shortage = shortage_in(_words(error), request)
        if shortage is None:
            raise
        return shortage
    logger.info("submitted %s", name)
    description = _follow(estimator.sagemaker_session.sagemaker_client, name, wait=wait, sleep=sleep)
    status, failure = description["TrainingJobStatus"], description.get("FailureReason", "")
    shortage = shortage_in(failure, request) if status == "Failed" else None
    return shortage or Submission(job_name=name, status=status, failure=failure, num_attempts=number)


def failure_code(failure: str) -> int:
    """Return the exit code that a failure's text states (``HET-31 ...``), or that of a failed script if it states none.

    Platforms keep only the text of a failure, not its exit code.
    """
    stated = stated_code(failure)
    return int(ExitCode.SCRIPT_FAILED) if stated is None else stated


def shortage_in(text: str, request: TrainingRequest) -> Shortage | None:
    """Return the shortage that an error's text or a FailureReason states, or None if it states no shortage.

    Args:
        text: The service's text, with the error's code.
        request: The request of the job.
    """
    found = _KIND.search(text)
    if found is None or text.lstrip().startswith(_OF_THE_SCRIPT):
        return None
    wanted = dict.fromkeys(group.instance_type for group in request.groups)
    named = tuple(kind for kind in wanted if kind in _TYPE.findall(text))
    quota = _QUOTA.search(text)
    why, is_final = "the platform has none free now", False
    if quota is not None:
        limit, used, delta = (int(quota[name]) for name in ("limit", "used", "delta"))
        is_final = delta > limit
        why = f"the account's quota is {limit}, {used} are in use and the job needs {delta}"
        why += ", which no waiting changes" if is_final else ""
    elif found[1] == "ResourceLimitExceeded":
        why = " ".join(text.split())[:300]
    return Shortage(kind=found[1], instance_types=named or tuple(wanted), why=why, is_final=is_final)


def _start(estimator: Any, inputs: Any, job_name: str | None) -> str:
    """Submit the job once and return its name."""
    if sdk_version(estimator) == 2:
        estimator.fit(inputs, wait=False, logs=False, job_name=job_name)
        return str(estimator.latest_training_job.name)
    estimator.train(inputs, wait=False, logs=False)
    return str(estimator._latest_training_job.training_job_name)


def _words(error: Exception) -> str:
    """Return the code and the message of an error of botocore. Empty for other errors."""
    response = getattr(error, "response", None)
    detail = response.get("Error", {}) if isinstance(response, Mapping) else {}
    return f"{detail['Code']}: {detail.get('Message', '')}" if "Code" in detail else ""


def _follow(client: Any, job_name: str, *, wait: bool, sleep: Callable[[float], None]) -> dict[str, Any]:
    """Wait until a job has ended, or without ``wait`` until it has its instances. Return its description."""
    said, silent_s = "", 0.0
    while True:
        asked_s = time.monotonic()
        try:
            description: dict[str, Any] = client.describe_training_job(TrainingJobName=job_name)
        except Exception as error:
            silent_s += time.monotonic() - asked_s
            if silent_s >= _LONGEST_SILENCE_S:
                logger.error("%s was submitted, and goes on; its state cannot be asked for", job_name)
                raise
            logger.warning("cannot ask for the state of %s, trying again: %s", job_name, _words(error) or error)
            sleep(_POLL_S)
            silent_s += _POLL_S
            continue
        silent_s = 0.0
        stage = description.get("SecondaryStatus", "")
        if stage != said:
            said = stage
            logger.info("%s: %s", job_name, stage)
        has_hosts = stage not in _WITHOUT_HOSTS
        if description["TrainingJobStatus"] in _ENDED or (has_hosts and not wait):
            return description
        sleep(_POLL_S)
