"""Finds what would go wrong on this host before a job starts: one finding for everything that has failed jobs before.

Each subject is one module with ``examine(surroundings) -> list[Finding]``. The examination works on a host of a job,
beside a running job, and on a machine that belongs to no cluster. It changes nothing and shows no secrets.
"""

from __future__ import annotations

from hetero.doctor.examination import examine, render_text, to_json
from hetero.doctor.finding import Finding, Level
from hetero.doctor.surroundings import Surroundings, look_around

__all__ = ["Finding", "Level", "Surroundings", "examine", "look_around", "render_text", "to_json"]
