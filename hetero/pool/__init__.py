"""Starts, watches and restarts the endpoints of a host, and tf.data servers.

In a launcher:

pool.py         a host's endpoints
figures.py      the state of a pool that other threads read
slot.py         one endpoint across restarts: its processes, whether they make progress, when they restart
spawn.py        starts a fork server, communicates with it, and reads what its processes print
tf_pool.py      a host's servers of tf.data service
tf_server.py    one server of tf.data service, in a separate process

In a process that the launcher starts:

fork_server.py  imports the user's script once and forks endpoints
builder.py      a process that builds data sets for all endpoints, and then takes over from the fork server
processes.py    processes of endpoints, as fork server and builder see them
packets.py      messages between the processes of a host
"""
