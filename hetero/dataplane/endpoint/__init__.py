"""In an endpoint process: computes and serves batches.

    fork_server -> endpoint -> service (gRPC: describe, prepare, admit)
                            -> transport (TCP: requests in, batches out) -> compute

fork_server.py   imports the script once and forks endpoints
script.py        the user's script as a module
endpoint.py      one endpoint process from start to end
service.py       what it answers
transport.py     the connections over which it delivers batches
compute.py       its queue and its compute thread
faulty.py        batches that are wrong on purpose, for tests
"""
