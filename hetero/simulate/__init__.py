"""Hosts of a cluster as processes of one machine, for `hetero simulate`.

simulate.py    a simulated job from its start to its report
launchers.py   one real launcher process for each simulated host
opt_ml.py      a folder for each host that looks like `/opt/ml`
"""
