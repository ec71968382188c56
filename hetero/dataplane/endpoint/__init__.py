"""Computes and serves batches. Runs in an endpoint process.

    fork_server -> endpoint -> service (gRPC: describe, prepare, admit)
                            -> delivery (requests in, batches out) -> compute

fork_server.py   imports the user's script once and forks endpoints
shared_builds.py what the fork server does about data sets that are built for all endpoints
zygote.py        a process that builds one of them, and forks endpoints that have it
prebuilt.py      what an endpoint knows of them
processes.py     processes of endpoints, as fork server and zygotes see them
packets.py       packets between these processes
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
