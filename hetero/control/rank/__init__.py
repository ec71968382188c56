"""The part of the control plane that runs in the process of a rank.

session.py     the rank's connection to the launcher of its host
variables.py   environment variables that tell a rank how to connect
metrics.py     `hetero.log_metric`, which logs a value such as the accuracy
stopping.py    ends a rank that was asked to stop and does not reach the end of its step
callbacks.py   runs the functions that the script has registered with `hetero.on_stop`
alone.py       stops a process that no launcher started, when it gets SIGTERM
"""
