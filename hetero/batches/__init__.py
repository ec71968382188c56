"""Batches as pure functions of (data set, indices, seed, epoch, position), without any network code.

    seeds.py      random keys, and the generators that they seed
    build.py      a data set built from its spec, ready for fetching
    batched.py    data sets with torch's __getitems__
    indices.py    indices in Python's own types and as canonical bytes
    request.py    everything that a batch depends on
    fetch.py      the pure function, and the description of a data set on this host
    samples.py    the samples of a batch, computed one by one or together
    skips.py      samples that raise, and the samples that replace them
    reach.py      which code and which globals a data set uses
    writes.py     where the user's source assigns or changes globals
    globals.py    comparison of these globals between processes
    purity.py     bit-exact comparison and digest of nested batches
    keras.py      Keras' PyDataset and Sequence: their items are batches and may change between epochs
    overlaps.py   subsets of one data set that share samples
    imported.py   access to modules that only the user's code imports
    failures.py   the user's exceptions as records that can be sent
    collation.py  batches of NumPy arrays, without torch
    structure.py  nested batch <-> tree and flat leaves
    trees.py      a nested batch without its leaves
    limits.py     limits on the structure of a batch
    leaves.py     arrays, tensors and long lists <-> bytes with dtype, shape and strides
    layouts.py    which strides a batch keeps

torch is imported lazily, only when the user's data set or its collation needs it.
"""
