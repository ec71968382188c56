"""Computes and serves batches. Runs in an endpoint process, which `hetero.pool` starts.

    endpoint -> service (gRPC: describe, prepare, admit)
             -> delivery (requests in, batches out) -> compute

endpoint.py   one endpoint process from start to end
options.py    the settings of an endpoint
script.py     imports the script as a module
prebuilt.py   the data sets that are built once, before the endpoints of a host are forked
service.py    the endpoint's answers to readers
delivery.py   the connections over which the endpoint delivers batches
replies.py    the answer to one request, and which thread sends it
compute.py    the queue and the threads that compute batches
batches.py    what one request asks for, a batch or a part of one
gathering.py  how a batch gets the samples that other hosts keep
parts.py      asks other endpoints for parts of a batch
link.py       the open connections from a rank, or from another endpoint, to an endpoint
failures.py   what readers get for an exception
"""
