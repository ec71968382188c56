"""Starts, watches and restarts the endpoints of a host, and tf.data servers. Runs in a launcher.

pool.py        a host's endpoints
figures.py     what other threads read from a pool
slot.py        one endpoint across restarts: its processes, whether they make progress, when they restart
spawn.py       starts a fork server, communicates with it, and reads what its processes print
tf_pool.py     a host's servers of tf.data service
tf_server.py   one of these servers
"""
