"""The part of the control plane that runs in a rank.

session.py     the connection to the launcher of this host
variables.py   the environment variables that connect it
metrics.py     `hetero.log_metric`
stopping.py    how a rank ends if it was asked to stop and does not reach the end of a step
callbacks.py   the callbacks that the script registered with `hetero.on_stop`
alone.py       a request to stop in a process that no launcher started
"""
