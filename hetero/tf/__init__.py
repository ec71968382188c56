"""TensorFlow datasets for a training script: batches of hetero's data plane, or elements of tf.data.service.

How `from_dataset` works:

1. A batch is the same as for `hetero.torch`: it depends only on data set, indices, seed and epoch. TensorFlow does not
   compute it.
2. `feed.py` keeps the order, the position in the order and the passes. It does not use TensorFlow. `dataset.py` makes a
   `tf.data.Dataset` of the feed.
3. Batches always come from endpoints over a reader. If the job has no endpoints, this process starts some
   (`hetero.loaders.local_endpoints`). This process never computes a batch itself, because TensorFlow asks for batches
   in its own threads while the script draws from the global random generators.
4. The element specification comes from two batches of different sizes. They are fetched before the first epoch and are
   not counted. A dimension that differs between them becomes None. If a later batch does not fit the specification, the
   error names the leaf and both shapes.
5. TensorFlow may begin a pass, and ask for its batches, long before the script needs them. Therefore TensorFlow's
   threads *begin* passes and *produce* batches, but a batch is *consumed* only when the script reports it. The script
   does so by a loop over the dataset itself, `measure`, the Keras callback or `mark_taken`. All but `mark_taken` also
   measure steps. Only consumed batches change the state and the ledger. `passes.py` lists the stages of a pass.
6. If the last batch of a pass was produced, or any of its batches was consumed, the next pass is the next epoch.
   Otherwise the next pass begins the same epoch again. For example, Keras builds a model from one batch, and then drops
   the pass.
7. The thread that trains reports consumed batches. With each report, this thread measures the data wait, and it ends
   the process if the job must stop. The data set's exceptions are raised in TensorFlow's threads. A loop over the
   dataset gets the original exception. Keras gets a tf.errors.OpError.
8. In a profile run, `produce` repeats kept batches after some time (`hetero.loaders.measuring.profiling`). TensorFlow's
   threads call the profiler when they take a batch, and the thread that trains calls it when it consumes the batch.
9. The state has the format of hetero.torch, takes less than 1 KiB and is the same on all ranks. Each of the two
   packages loads the other's state.

How `distribute` works:

1. TensorFlow provides the dataset, the servers (tf.data.service), their guarantees and their errors. hetero names the
   shared jobs and chooses the workers (`served.py`). It rejects datasets that TensorFlow would silently process wrongly
   (`movable.py`).
2. The resulting dataset counts and measures steps, with or without tf.data.service (`measured.py`). In a script's loop
   the thread that trains measures them. Steps of `fit` are measured by the times when batches left the pipeline
   (`deliveries.py`).

Files. All of them run in a rank, on the thread that trains, unless another thread is named::

    api.py          from_dataset and distribute
    callback.py     Keras' callback, which reports steps
    iterators.py    the iterator that both datasets give to a script's loop

    from_dataset:  api -> dataset -> feed -> passes
    dataset.py      the tf.data.Dataset, and what a script calls on it
    elements.py     batches as nested arrays, and their specification
    feed.py         order and position; produces batches in TensorFlow's threads
    lanes.py        the feed of an iterable
    passes.py       the stages of TensorFlow's passes; used by both kinds of threads under one lock

    distribute:  api -> served -> movable, and api -> measured -> deliveries
    movable.py      whether tf.data.service can make a dataset
    served.py       a dataset that reads from the job's tf.data.service
    measured.py     the tf.data.Dataset that counts and measures its steps
    deliveries.py   the times when batches left a pipeline; written in TensorFlow's threads

TensorFlow makes files ``__autograph_generated_file*.py`` in the folder for temporary files. A rank that fails or is
killed leaves them there, and the files do not tell which process made them. Ranks do not get a temporary folder each,
for two reasons. Such a folder would also hold files that other ranks and the next run need, such as the models of
TensorFlow Hub. The paths of multiprocessing's sockets in such a folder would be too long.

The package imports TensorFlow only when a script calls one of the two functions, because data hosts import the script
too and do not need TensorFlow.
"""

from hetero.tf.api import distribute, from_dataset

__all__ = ["distribute", "from_dataset"]
