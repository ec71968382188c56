"""In an endpoint process: computes and serves batches.

    fork_server -> endpoint -> service (gRPC: describe, prepare, admit)
                            -> transport (TCP: requests in, batches out) -> compute

fork_server.py   imports the script once and forks endpoints
script.py        the user's script as a module
endpoint.py      one endpoint process from start to end
service.py       its answers to readers
transport.py     the connections over which it delivers batches
compute.py       its queue and its compute threads
faulty.py        calls that fail on purpose, for tests
"""
