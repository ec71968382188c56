"""Simulates the hosts of a cluster on one machine, for `hetero simulate` and rehearsals of SageMaker jobs.

simulate.py    a simulated job from its start to its report
launchers.py   one real launcher process for each simulated host
opt_ml.py      a folder for each host that looks like `/opt/ml`

These modules run in the process of the command. `simulate` fills a folder for each host with `opt_ml`. `launchers`
starts a launcher for each host, relays the launchers' output in a thread, and kills the processes that are left.
"""
