"""Simulates the hosts of a cluster on one machine, for `hetero simulate` and rehearsals of SageMaker jobs.

simulate.py    runs a simulated job from its start to its report
launchers.py   starts a real launcher process for each simulated host, shows its output, and ends it
opt_ml.py      writes a folder like `/opt/ml` for each host, which its launcher reads

These modules run in the process of the command. A thread of this process shows the output of the launchers.
"""
