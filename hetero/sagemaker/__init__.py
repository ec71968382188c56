"""From a SageMaker estimator with instance groups to a heterogeneous job.

Importing this imports neither boto3 nor the SageMaker SDK, either version of which will do.
"""

from __future__ import annotations

from hetero.sagemaker.checks import Finding, check, check_request, findings_json, findings_text
from hetero.sagemaker.metrics import METRIC_DEFINITIONS
from hetero.sagemaker.recording import Recording, offline_session, record
from hetero.sagemaker.rehearsal import Rehearsal, rehearse
from hetero.sagemaker.request import TrainingRequest, read_request
from hetero.sagemaker.staging import prepare
from hetero.sagemaker.submission import Submission, submit

__all__ = [  # noqa: RUF022  in the order of characters, as a test has it
    "Finding",
    "METRIC_DEFINITIONS",
    "Recording",
    "Rehearsal",
    "Submission",
    "TrainingRequest",
    "check",
    "check_request",
    "findings_json",
    "findings_text",
    "offline_session",
    "prepare",
    "read_request",
    "record",
    "rehearse",
    "submit",
]
