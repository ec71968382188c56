"""Measurements of a job: steps of its loaders, skipped samples, resources of its hosts, and metrics of its script.

steps.py         step time and data wait of one loader, and the bytes of its batches
skips.py         the samples that one loader skipped
hosts.py         CPU, memory, network and GPU of one host
excess.py        which share of a run's time may be due to others
history.py       a history of bounded length, for steps and usage
step_series.py   the history of a loader's steps
usage_series.py  the history of a host's resources, and percentiles in little memory
figures.py       a number with its unit and origin
headspace.py     how many vCPUs, hosts or slots suffice for steps without waits
logged.py        values that the script logs, such as its accuracy
lines.py         log lines with figures, which the platform reads
profile/         what the steps and samples of a job cost (`Profile`)

A rank's session reports the steps. The host's launcher samples its resources in a separate thread.
"""
