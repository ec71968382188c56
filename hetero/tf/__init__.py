"""The TensorFlow face: batches of the data plane, or elements of TensorFlow's own service, as a `tf.data.Dataset`.

How `from_dataset` works:

1. A batch is what it is for `hetero.torch`: a pure function of data set, indices, seed and epoch. TensorFlow moves it.
2. `feed.py` owns order, place and passes, and knows no TensorFlow. `dataset.py` makes a `tf.data.Dataset` of it.
3. Batches always come from endpoints over a reader: the job's, or this process's own (`local.py`) where the job has
   none. Never from this process: TensorFlow asks in its own threads, while the script draws from the generators here.
4. The element specification comes from two batches of different sizes, fetched before the first epoch and not counted:
   what differs between them is None. A later batch that does not fit it is an error that names leaf and shapes.
5. TensorFlow begins passes, and prefetches over their ends, when it likes. So a pass is *begun* and *produced* in its
   threads, and *taken* where the script says so: by a loop over the dataset itself, by `measure`, the Keras callback or
   `mark_taken`. Only what is taken moves the state and the ledger, and all but `mark_taken` measure it.
6. A pass that was produced to its end, or of which a batch was taken, is followed by the next epoch. One that was
   dropped before that did not happen: Keras looks at a batch to build a model, and its epoch begins again.
7. Taking is also where the job may stop and what measures data wait, on the thread that trains. TensorFlow's threads
   raise what the data set raised; a loop over the dataset gets the original exception, Keras a tf.errors.OpError.
8. The state is that of hetero.torch: under 1 KiB, the same on all ranks, and either loads the other's.

How `distribute` works:

1. The dataset is TensorFlow's own, and so are the servers (tf.data.service), what they guarantee and their errors. Ours
   are the names of shared jobs, the choice of workers (`served.py`), and what is refused because TensorFlow would
   get it wrong without a word (`movable.py`).
2. Whatever its elements come from, the result counts and measures steps (`measured.py`): in a loop of the script on the
   thread that trains; in `fit` by the times at which batches came out of the pipeline (`deliveries.py`).

Nothing here imports TensorFlow before one of the two is called: data hosts import the script too, and need none.
"""

from hetero.tf.api import from_dataset
from hetero.tf.distribute import distribute

__all__ = ["distribute", "from_dataset"]
