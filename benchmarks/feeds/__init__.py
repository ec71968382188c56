"""Endpoints of a real pool, and the batches that they serve.

served.py         a pool in a server process, and a fleet in the trainer process that reads from it
ready_feeds.py    ready-made batches from these endpoints or from torch's loader processes
ready_batches.py  script of the endpoints: data sets that preprocess nothing
noise_batches.py  script of the endpoints: random bytes, made anew for each sample
compressible.py   script of the endpoints: batches that compress as real data do
photo_arrays.py   script of the endpoints: the JPEG pipeline as arrays, for TensorFlow
"""
