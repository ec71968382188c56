"""The parts of a loader that do not depend on a framework.

sampling.py         the loader's own order: which samples make batch k of an epoch on a rank
parts.py            the part of a data set that a canary run uses
state.py            a loader's position: epochs, batches delivered, and both as a checkpoint
prefetching.py      the requests of a pass, and then the requests of the next epochs
pipeline.py         options of one loader, and its data set, order, position and requests
measuring/          times the steps of a loader, and profiles it
kept_batches.py     the batches that the profiler repeats
crosscheck.py       compares globals and first batches of endpoints with this process's own
remote.py           this process's fleet of endpoints, and its readers
local_endpoints.py  endpoints that this process starts for itself
lanes/              loaders of an iterable: their options, positions and snapshots of lanes, ends of passes
auditing.py         records delivered batches in this rank's ledger
checks.py           checks of arguments that all frameworks share

`hetero.torch` and `hetero.tf` are built on this package. It imports neither torch nor TensorFlow.
"""
