"""Check, rehearse, prepare and submit a SageMaker job with instance groups.

Version 2 and version 3 of the SageMaker SDK both work. Importing this package imports neither boto3 nor the SDK.
"""

from __future__ import annotations

from hetero.sagemaker.checks import Finding, check, check_request, findings_json, findings_text
from hetero.sagemaker.metrics import METRIC_DEFINITIONS
from hetero.sagemaker.recording import Recording, offline_session, record
from hetero.sagemaker.rehearsal import Rehearsal, rehearse
from hetero.sagemaker.request import TrainingRequest, read_request
from hetero.sagemaker.staging import prepare
from hetero.sagemaker.submission import Submission, submit

__all__ = [  # noqa: RUF022  a test expects the order of the characters
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
