"""Measures what the samples of a job cost on one host, after the training of a profile run.

    launcher -> measuring -> fetcher, one process per CPU
                          -> receiving -> an endpoint that serves `ready_batches`

options.py     what the launcher wants measured, and how the processes exchange messages
samples.py     CPU and wall time of samples, and of collating and encoding them, in this process
contents.py    what a batch consists of: leaves, bytes on the network, size and time with each codec
fetcher.py     a process that fetches samples like an endpoint
measuring.py   the process that starts fetchers, first one and then several together, and collects the figures
receiving.py   a process that receives batches from an endpoint, as a rank does
ready_batches.py    the data set of that endpoint, whose samples cost nothing

A rank uses samples.py and contents.py itself if hosts cannot build its data set.
"""
