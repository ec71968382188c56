"""TensorFlow datasets for a training script: batches of hetero's data plane, or elements of tf.data.service.

How `from_dataset` works:

1. A batch is the same as for `hetero.torch`: a pure function of data set, indices, seed and epoch. TensorFlow only
   moves it.
2. `feed.py` keeps the order, the place in it and the passes. It does not use TensorFlow. `dataset.py` makes a
   `tf.data.Dataset` of the feed.
3. Batches always come from endpoints over a reader. If the job has no endpoints, this process starts some
   (`hetero.loaders.local_endpoints`). This process never computes a batch itself, because TensorFlow asks for batches
   in its own threads while the script draws from the global random generators.
4. The element specification comes from two batches of different sizes. They are fetched before the first epoch and are
   not counted. A dimension that differs between them becomes None. If a later batch does not fit the specification, the
   error names the leaf and both shapes.
5. TensorFlow begins passes and prefetches beyond their ends when it likes. Therefore passes are *begun* and batches are
   *produced* in TensorFlow's threads, but a batch is *consumed* (``taken`` in names) only when the script reports it.
   A loop over the dataset itself, `measure`, the Keras callback and `mark_taken` report it. Only consumed batches
   change the state and the ledger. All of these reports except `mark_taken` also measure steps.
6. The next pass is the next epoch if the pass before it was produced to its end or one of its batches was consumed. A
   pass that was dropped earlier did not happen, and its epoch begins again. For example, Keras drops a pass after
   looking at one batch to build a model.
7. The report of a consumed batch comes from the thread that trains. There the job may stop, and the data wait is
   measured. Exceptions of the data set are raised in TensorFlow's threads. A loop over the dataset gets the original
   exception. Keras gets a tf.errors.OpError.
8. The state is that of hetero.torch. It takes less than 1 KiB and is the same on all ranks. Each of the two packages
   loads the other's state.

How `distribute` works:

1. The dataset, the servers (tf.data.service), their guarantees and their errors are TensorFlow's. hetero adds the names
   of shared jobs, the choice of workers (`served.py`), and the rejection of datasets that TensorFlow would silently
   process wrongly (`movable.py`).
2. The result counts and measures steps wherever its elements come from (`measured.py`). A loop of the script measures
   on the thread that trains. `fit` is measured by the times at which batches left the pipeline (`deliveries.py`).

The package imports TensorFlow only when a script calls one of the two functions, because data hosts import the script
too and do not need TensorFlow.
"""

from hetero.tf.api import from_dataset
from hetero.tf.distribute import distribute

__all__ = ["distribute", "from_dataset"]
