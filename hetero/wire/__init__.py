"""Conversion between bytes on the network and typed batches. Received bytes are never trusted.

limits.py        bounds of the memory that a peer can make this process allocate, and the protocol's version
framing.py       a nested batch <-> an answer, which is a message and the payload after it
trees.py         the structure of a batch <-> its message
compression.py   payload <-> smaller blocks
streams.py       TCP connections that carry requests and batches
tls_streams.py   the same connections under TLS
tls.py           this host's certificate, and TLS sessions
certificates.py  makes the certificates of a job
requests.py      batch requests, specs and failures <-> their messages
keys.py          indices that are not all integers <-> their messages
skips.py         the skipped samples of a batch <-> bytes
messages.py      parses protobuf messages
channels.py      options of gRPC channels and servers
proto/           generated messages
"""
