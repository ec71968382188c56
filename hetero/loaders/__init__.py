"""What a loader is made of that no framework has a part in.

sampling.py   its own order: which samples make batch k of an epoch on a rank
state.py      its place in it: epochs, batches delivered, and both as a checkpoint
pipeline.py   what one loader is asked for; its data set, order, place and requests
timing.py     its step timer
crosscheck.py compares globals and first batches of endpoints with this process's own
remote.py     this process's fleet of endpoints, and readers of it
auditing.py   enters what is delivered into this rank's ledger
checks.py     what arguments may be, whatever the framework

`hetero.torch` and `hetero.tf` are built on it; neither torch nor TensorFlow is imported here.
"""
