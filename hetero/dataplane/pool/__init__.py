"""In a launcher: starts, watches and restarts the endpoints of a host, and tf.data servers.

pool.py        a host's endpoints
slot.py        the place of one endpoint, through its restarts
liveness.py    whether an endpoint makes progress
restarts.py    how long to wait before the next start, and when to give up
spawn.py       starts a fork server and communicates with it
output.py      the output of child processes
tf_pool.py     a host's servers of tf.data service
tf_server.py   one of these servers
"""
