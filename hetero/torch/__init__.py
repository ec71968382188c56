"""The PyTorch interface: a subclass of torch's `DataLoader` whose batches come from endpoints if the job has them.

    loader.py         `DataLoader`: its arguments, and the attributes that torch's loader has
    checks.py         checks of its arguments
    pipeline.py       what the loader and all its views share: data set, order, position, source of the batches
    order/            the order of a user's sampler, and warnings about mistakes in it
    passes.py         one pass over the loader
    local.py          batches made in this process or in torch's workers
    local_dataset.py  the data set that answers the requests in this process or in torch's workers
    kept_batches.py   the batches that a profile run repeats, with tensors
    leaf_copies.py    batches that share no memory with the data set that made them
    pinned.py         memory that an accelerator copies from directly
    shared_memory.py  whether /dev/shm has room for the batches of torch's workers
    lightning_states.py  what Lightning does with the states of loaders
    views.py          what accelerate, Lightning and others see when they rebuild the loader
    view_pass.py      one pass over a rebuilt loader

In a plain loop, a batch takes the following path. Everything runs in the script's thread, except where stated:

    loader.__iter__ -> passes.Pass
      pipeline.plan      -> BuiltInOrder (hetero.loaders.sampling) or SamplerOrder yields a PlannedBatch with its work
      pipeline.request   -> a BatchRequest with the same work
      pipeline.open      -> hetero.loaders.remote: endpoints, whose answers the fetchers' threads receive
                         or local.LocalFetcher: this process, or torch's workers
    Pass.__next__        <- the batch and its request. Pass records them in the ledger and in the loader's position

A tool such as accelerate makes another loader. A `view_pass.RequestedBatch` then carries the request through the tool's
loader to `views.DatasetView`, which fetches the batch.
"""

from hetero.loaders.pipeline import answer_lengths, is_remote
from hetero.torch.loader import DataLoader

if is_remote():  # the script may call len(spec) before it makes a loader
    answer_lengths()

__all__ = ["DataLoader"]
