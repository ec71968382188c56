"""Batches as pure functions of (data set, indices, seed, epoch, position); no network.

    seeds.py      keys, and the generators that they seed
    build.py      a data set built from its spec, ready to be fetched from
    indices.py    what samplers yield, in plain form and as canonical bytes
    request.py    everything that a batch depends on
    fetch.py      the pure function, and what a data set looks like on this host
    samples.py    its samples: one by one, or together
    skips.py      samples that raise, and those that stand in for them
    reach.py      which code and which globals a data set uses
    writes.py     where the user's source assigns or changes globals
    globals.py    those globals compared between processes
    purity.py     bit-exact comparison and digest of nested batches
    keras.py      Keras' PyDataset and Sequence: items that are batches, and what they are in each epoch
    overlaps.py   subsets of one data set that share samples
    imported.py   modules that only the user's code imports
    failures.py   the user's exceptions as records that can travel
    collation.py  batches of NumPy arrays, without torch
    structure.py  nested batch <-> tree and flat leaves
    trees.py      a nested batch without its leaves
    leaves.py     arrays, tensors and long lists <-> bytes with dtype, shape and strides
    layouts.py    strides: which ones a batch keeps

torch is imported lazily, only where the user's data set or its collation needs it.
"""
