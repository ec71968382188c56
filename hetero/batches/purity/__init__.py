"""Checks that the data set of a script gives the same samples in every process.

comparison.py  bit-exact comparison and digest of nested samples and batches
reach.py       search for the code and the globals that a data set uses
changes.py     search in source code for the variables that it changes, when processes differ
overlaps.py    warnings about subsets of one data set that share samples
values.py      digests of values: of plain data, or of everything that a value holds
globals.py     comparison of the globals that a data set uses, between processes
"""
