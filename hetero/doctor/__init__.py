"""What would go wrong on this host before a job is started: a finding for everything that jobs have failed of.

One module per subject, each with ``examine(surroundings) -> list[Finding]``. It works on a host of a job, beside a job
that runs, and on a machine that belongs to no cluster; nothing is changed and nothing secret is said.
"""

from __future__ import annotations

from hetero.doctor.examination import examine, render_text, to_json
from hetero.doctor.finding import Finding, Level
from hetero.doctor.surroundings import Surroundings, look_around

__all__ = ["Finding", "Level", "Surroundings", "examine", "look_around", "render_text", "to_json"]
