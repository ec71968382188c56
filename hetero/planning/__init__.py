"""Decides before a job: which machines, what they cost, or that data hosts do not pay.

::

    ranks, hosts -> parts -> assembly -> profile.json -> StepModel -> search -> Plan -> text, JSON, HTML

profile.py       the measured figures of a job (`Profile`), their limits, and the reader and writer of ``profile.json``
parts.py         what each rank and host contributes to a profile
assembly.py      makes a profile from these parts
profile_text.py  shows a profile as Markdown
options.py       what the user asks of a plan (`PlanOptions`)
machines.py      the machines of a menu (`Machine`), from the catalogue of instance types
candidates.py    a cluster that a plan considers (`Candidate`)
steps/           predicts the step time of candidates, with intervals (`StepModel`)
enumeration.py   the candidates of a plan
ranking.py       ranks thousands of candidates
finals.py        chooses among the best ones by their timelines
search.py        finds the cluster for a job, and the alternatives to it
reasons.py       the sentences: the answer, its reason, why alternatives were rejected, notes
plan.py          the result (`Plan`), and the reader of ``plan.json``
plan_text.py     shows a plan as text
plan_page.py     shows a plan as an HTML page
plan_plot.py     the page's drawing of cost against step time

The code measures nothing. Plans are made in the user's shell. Launchers use profile.py, parts.py, assembly.py,
profile_text.py and headspace.py. Ranks use parts.py. Therefore this module imports nothing before it is needed: plans
need NumPy, which launchers must not import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero.planning.plan import Plan, PlanOptions, load_plan, make_plan
    from hetero.planning.profile import Profile, load_profile, write_profile

__all__ = ["Plan", "PlanOptions", "Profile", "load_plan", "load_profile", "make_plan", "write_profile"]

_OF_PROFILES = ("Profile", "load_profile", "write_profile")


if not TYPE_CHECKING:  # with a module __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name from its module the first time it is used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        if name in _OF_PROFILES:
            import hetero.planning.profile as home
        else:
            import hetero.planning.plan as home
        value = getattr(home, name)
        globals()[name] = value
        return value
