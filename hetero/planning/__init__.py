"""Decides before a job: which machines, what they cost, or that data hosts do not pay.

::

    profile.json -> StepModel -> search -> Plan -> text, JSON, HTML

profile.py     the measured figures of a job (`Profile`), and the reader and writer of ``profile.json``
machines.py    the machines of a menu (`Machine`), from the catalogue of instance types
candidates.py  a cluster that a plan considers (`Candidate`)
model.py       predicts the step time of candidates, with intervals (`StepModel`)
uncertain.py   the figures of a profile with their uncertainty, from which intervals come
search.py      enumerates candidates and chooses one
reasons.py     the sentences: the answer, its reason, why alternatives were rejected, notes
plan.py        the result (`Plan`), and the reader of ``plan.json``
plan_text.py   shows a plan as text
plan_page.py   shows a plan as an HTML page
plan_plot.py   the page's drawing of cost against step time

The code runs in the user's shell. It measures nothing.
"""

from __future__ import annotations

from hetero.planning.plan import Plan, PlanOptions, load_plan, make_plan
from hetero.planning.plan_page import plan_page
from hetero.planning.plan_text import plan_text
from hetero.planning.profile import Profile, load_profile, write_profile

__all__ = [
    "Plan",
    "PlanOptions",
    "Profile",
    "load_plan",
    "load_profile",
    "make_plan",
    "plan_page",
    "plan_text",
    "write_profile",
]
