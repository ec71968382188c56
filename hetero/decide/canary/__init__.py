"""Canary training: forecasts a whole job from short runs on a few percent of its data.

::

    CanaryRequest -> PlannedCanary -> RunResult -> CanaryPoint -> Forecast -> CanaryReport
        design.py        hetero.decide.studies    observations.py   forecast.py   conducting.py

files.py         chooses a fraction of a channel's files, and links them
design.py        the runs, with the data and the fraction that each gets
identity.py      what must be the same if a study goes on
conducting.py    executes the runs through `hetero.decide.studies`, and writes the result
observations.py  a run's report, and what its ranks observed, as a point
points.py        one run as the forecast sees it
line.py          fits a line through the points, and draws what it predicts for the whole
quadratic.py     the longest time that the points do not exclude
forecast.py      time as a sum of parts, cost, utilisation, memory
refusals.py      the reasons to refuse a forecast
suggestions.py   what more canaries would tell
comparison.py    which candidate is the cheapest
model.py         the result, ``canary.json``
output/          shows the result

`line`, `quadratic`, `forecast`, `refusals`, `suggestions` and `comparison` are pure. They know points, not hetero's
jobs. `hetero.sagemaker.canary` therefore uses them for jobs of any algorithm. `hetero.launch.ranks.observed` observes
the script, and `hetero.loaders.parts` shortens the loaders.
"""
