"""Plan, prepare, check, rehearse and submit a SageMaker job with instance groups.

preparation/  `prepare`: copies the code, adds hetero, changes the estimator
checks/       `check`: finds mistakes in a request
rehearsal/    `rehearse`: runs a request on simulated hosts
canaries/     `canary`: forecasts a job from jobs on a few percent of its files
submission/   `submit`: starts a job, and starts it again if SageMaker lacks instances
planning.py   `plan`: returns the instance groups of a plan for an estimator
study_executor.py  executes the runs of a study as training jobs
recording.py  records the request that the SDK would send
request.py    a request as typed records
limits.py     the service's limits on a request, from limits.yaml

The five folders import recording.py and request.py, and some of them import limits.py. planning.py and
study_executor.py import preparation/. rehearsal/ also imports preparation/ and checks/, study_executor.py imports
submission/, and canaries/ imports study_executor.py and rehearsal/. Version 2 and version 3 of the SDK both work.
Importing this package imports neither boto3 nor the SDK.
"""

from __future__ import annotations

from hetero.sagemaker.canaries.canary import canary
from hetero.sagemaker.checks.check import Finding, check, check_request, findings_json, findings_text
from hetero.sagemaker.planning import plan
from hetero.sagemaker.preparation.metric_definitions import METRIC_DEFINITIONS, logged_metric
from hetero.sagemaker.preparation.staging import prepare
from hetero.sagemaker.recording import Recording, offline_session, record
from hetero.sagemaker.rehearsal.rehearse import Rehearsal, rehearse
from hetero.sagemaker.request import TrainingRequest, read_request
from hetero.sagemaker.submission.submit import Submission, submit

__all__ = [  # noqa: RUF022  sorted by character codes, as a test checks
    "Finding",
    "METRIC_DEFINITIONS",
    "Recording",
    "Rehearsal",
    "Submission",
    "TrainingRequest",
    "canary",
    "check",
    "check_request",
    "findings_json",
    "findings_text",
    "logged_metric",
    "offline_session",
    "plan",
    "prepare",
    "read_request",
    "record",
    "rehearse",
    "submit",
]
