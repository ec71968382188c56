"""Measurements of a job: steps of its loaders, skipped samples, resources of its hosts, and metrics of its script.

steps.py         measures the steps of one loader: step time, data wait, and bytes of the batches
skips.py         counts the samples that one loader skipped
hosts.py         reads CPU, memory, network and GPU of one host
excess.py        estimates which share of a run's time other programs of its machines may have taken
history.py       keeps a series of measurements of any length in at most 120 points
step_series.py   the series of the steps of a loader
usage_series.py  the series of the resources of a host, and percentiles of many readings in little memory
reading.py       measures how long a process waits for storage, and for which shards
figures.py       a number with its unit, and whether it was measured, simulated or computed
headspace.py     computes how many vCPUs, hosts or endpoints make batches as fast as the accelerators use them
logged.py        keeps the values that the script logs, such as its accuracy
lines.py         writes log lines with figures, for services of the platform that read logs, such as CloudWatch
profile/         the profile of a job (`Profile`): what a step and a sample cost, for `hetero plan`

Steps are measured in the ranks, which send them to the launcher of their host. The launcher measures the resources of
the host in a separate thread.
"""
