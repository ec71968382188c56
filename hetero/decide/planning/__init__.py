"""Decides before a job: which machines, what they cost, or that data hosts do not pay.

::

    profile.json -> StepModel -> search -> Plan -> text, JSON, HTML

options.py       what the user asks of a plan (`PlanOptions`)
machines.py      the machines of a menu (`Machine`), from the catalogue of instance types
candidates.py    a cluster that a plan considers (`Candidate`)
steps/           predicts the step time of candidates, with intervals (`StepModel`)
enumeration.py   the candidates of a plan
ranking.py       ranks thousands of candidates
finals.py        chooses among the best ones by their timelines
search.py        finds the cluster for a job, and the alternatives to it
reasons.py       the sentences: the answer, its reason, why alternatives were rejected, notes
plan.py          makes the result (`hetero.report.plan.Plan`)
plan_text.py     shows a plan as text
plan_page.py     shows a plan as an HTML page
plan_plot.py     the page's drawing of cost against step time

The code measures nothing. Plans are made in the user's shell. They need NumPy.
"""
