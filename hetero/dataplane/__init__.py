"""The data plane. Endpoints compute batches, readers put them in order.

reader/            in a rank: asks for batches by index and delivers them in order
endpoint/          in an endpoint process: computes and serves batches
endpoint_link.py   the open connections from a rank, or from another endpoint, to an endpoint
pool/              in a launcher: starts, watches and restarts the endpoints of a host
supply/            after the training of a profile run: measures what samples cost on a host
"""
