"""Conversion between bytes on the network and typed batches. Received bytes are never trusted.

limits.py        the protocol's constants, and bounds of the memory that a peer can make this process allocate
framing.py       a nested batch <-> an answer, which is a message and the payload after it
trees.py         the structure of a batch <-> its message
compression.py   payload <-> smaller blocks
transports/      connections that carry requests and batches, over TCP and TLS
tls.py           this host's certificate, and TLS sessions
certificates.py  makes the certificates of a job
faults.py        why a call to an endpoint fails, and what the reader does
requests.py      batch requests, specs and failures <-> their messages
indexed.py       indexed work <-> its fields of a request
messages.py      parses protobuf messages
records.py       dataclasses <-> messages with fields of the same names
channels.py      options of gRPC channels and servers
proto/           generated messages
"""
