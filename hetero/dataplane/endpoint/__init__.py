"""Computes and serves batches. Runs in an endpoint process.

    fork_server -> endpoint -> service (gRPC: describe, prepare, admit)
                            -> delivery (requests in, batches out) -> compute

fork_server.py   imports the user's script once and forks endpoints
script.py        imports the script as a module
options.py       the settings of an endpoint
endpoint.py      one endpoint process from start to end
service.py       the endpoint's answers to readers
delivery.py      the connections over which the endpoint delivers batches
compute.py       the queue and the threads that compute batches
"""
