"""Checks that the data set of a script gives the same samples in every process.

comparison.py  bit-exact comparison and digest of nested samples and batches
reach.py       search for the code and the globals that a data set uses
changes.py     search in the source of a data set for variables that its code changes itself, if processes differ
overlaps.py    warnings about subsets of one data set that share samples
values.py      digests of values: of plain data, or of everything that a value holds
globals.py     comparison of the globals that a data set uses, between processes
"""
