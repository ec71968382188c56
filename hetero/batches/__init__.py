"""Batches as pure functions of (data set, indices, seed, epoch, position), without any network code.

    seeds.py      random keys, and the generators that they seed
    build.py      a data set built from its spec, ready for fetching
    batched.py    data sets with torch's __getitems__
    keras.py      Keras' PyDataset and Sequence: their items are batches and may change between epochs
    indices.py    indices in Python's own types and as canonical bytes
    request.py    the request for a batch: everything that the batch depends on
    fetch.py      the function that computes a batch, and the description of a data set on this host
    indexed.py    computes the samples at the indices in a request, for map-style data sets
    skips.py      samples that raise, and the samples that replace them
    failures.py   the user's exceptions as records that can be sent
    collation.py  batches of NumPy arrays, without torch
    imported.py   access to modules that only the user's code imports
    structure/    conversion of a nested batch to a tree and flat leaves, and back
    purity/       checks that a data set gives the same samples in every process

torch is imported lazily, only when the user's data set or its collation needs it.
"""
