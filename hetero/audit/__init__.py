"""Records the data that a run trained on in one ledger per rank, and compares the ledgers of two runs.

In a rank of a run with ``--audit``, a loader passes every batch to the ledger before the script receives the batch:

ledger.py     writes a ledger, and defines its format

``hetero audit A B`` compares two runs. The modules call each other in this order:

commands.py   compares two runs, given as paths, and returns the answer as text
runs.py       finds the ledgers in a run's folder
reading.py    verifies the hash chain of a ledger and collects its batches
history.py    keeps the last delivery of each batch, because a restart repeats steps
compare.py    compares both runs and names the first difference
"""
