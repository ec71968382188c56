"""Checks that the data set of a script gives the same samples in every process.

comparison.py  bit-exact comparison and digest of nested samples and batches
reach.py       search for the code and the globals that a data set uses
changes.py     search in the source of a data set, when processes differ, for what its code changes itself
globals.py     comparison of these globals between processes
overlaps.py    warnings about subsets of one data set that share samples
"""
