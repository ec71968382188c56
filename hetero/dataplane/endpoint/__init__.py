"""Computes and serves batches. Runs in an endpoint process.

    fork_server -> endpoint -> service (gRPC: describe, prepare, admit)
                            -> delivery (requests in, batches out) -> compute

fork_server.py   imports the user's script once and forks endpoints
builder.py       a process that builds data sets for all endpoints, and then takes over from the fork server
prebuilt.py      what an endpoint knows of these data sets
processes.py     processes of endpoints, and packets between them, as fork server and builder see them
script.py        imports the script as a module
options.py       the settings of an endpoint
endpoint.py      one endpoint process from start to end
service.py       the endpoint's answers to readers
delivery.py      the connections over which the endpoint delivers batches
replies.py       the answer to one request, and which thread sends it
batches.py       what one request asks for, a batch or a part of one
gathering.py     how a batch gets the samples that other hosts keep
parts.py         asks other endpoints for parts of a batch
failures.py      what readers get for an exception
compute.py       the queue and the threads that compute batches
"""
