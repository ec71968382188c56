"""Parts of MLBench's closed division, shared by the scripts in the folder above.

The algorithms:

    prescription.py   the document's numbers: rates, batches, targets, published times and prices
    residual.py       the residual networks of task 1a
    linear.py         the logistic regression of task 2a and its loss

The data:

    cifar.py          reader of CIFAR-10's binary files
    images.py         the data set of task 1a: records, crop, flip, normalisation
    libsvm.py         reader of LIBSVM files, with one line in memory, and the matrix that a file is converted to
    rows.py           the data set of task 2a
    standin.py        generators of stand-in data in both formats

A run:

    options.py        options of both scripts
    workers.py        joins the process group
    network.py        network interfaces of a stated bandwidth between workers of one machine
    exchange.py       the average of the gradients after each mini-batch, and its time
    course.py         the clock of the training, evaluations, logged metrics

The results:

    figures.py        time to accuracy, accuracy after time, speed-up, cost: arithmetic on logged values

A script imports the algorithm, the data set and the run. `compare.py` imports figures.py. Nothing in a run imports
figures.py, so it applies to the metrics of any script.
"""
