"""Bytes in, typed batches out, nothing trusted.

limits.py       what a peer may make us allocate, and the protocol's version
framing.py      a nested batch <-> an answer: a message, and the payload after it
trees.py        the structure of a batch <-> its message
compression.py  payload <-> smaller blocks
streams.py      TCP connections that carry requests and batches
requests.py     a batch request and a failure <-> their messages
channels.py     options of gRPC channels and servers
proto/          generated messages
"""
