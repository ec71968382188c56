"""A rank's end of the control plane.

session.py     the connection to the launcher of this host
stopping.py    agreeing with the other ranks on the last step
callbacks.py   what the script registered with `hetero.on_stop`
"""
