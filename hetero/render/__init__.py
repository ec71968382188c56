"""Renders a job as the script or manifest that a platform takes: ``hetero render``.

request.py     what the user asks for
slurm.py       a batch script
kubernetes.py  what the manifests of Kubernetes have in common
jobset.py      a JobSet
trainjob.py    a TrainJob of Kubeflow, with its runtime
volcano.py     a job of Volcano
vertex.py      a custom job of Vertex AI
spot.py        what they say for capacity that the platform may take back

All are pure: a request becomes a text. `hetero.cluster.platforms` reads in each host what the text has told it.
`hetero.sagemaker` does the same for SageMaker, whose jobs are made with its SDK.
"""

from __future__ import annotations

from collections.abc import Callable

from hetero.render.jobset import render_jobset
from hetero.render.request import RenderRequest, make_request
from hetero.render.slurm import render_slurm
from hetero.render.trainjob import render_trainjob
from hetero.render.vertex import render_vertex
from hetero.render.volcano import render_volcano

__all__ = ["RENDERERS", "RenderRequest", "make_request", "render_slurm"]

RENDERERS: dict[str, Callable[[RenderRequest], str]] = {
    "slurm": render_slurm,
    "jobset": render_jobset,
    "trainjob": render_trainjob,
    "volcano": render_volcano,
    "vertex": render_vertex,
}
"""The functions by the name of their platform."""
