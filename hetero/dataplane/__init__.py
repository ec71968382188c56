"""The data plane: endpoints compute batches, readers put them in order.

pool.py         a host's endpoints, seen from its launcher
forker.py       imports the script once and forks endpoints
script.py       the user's script as a module
endpoint.py     one preprocessing process
service.py      what it answers
compute.py      its queue and compute thread
reader.py       a rank's batches in order
fleet.py        all endpoints as one reader process sees them
agreement.py    whether they hold the same data set
connection.py   one of them
"""
