"""Checks that the data set of a script gives the same samples in every process.

comparison.py  bit-exact comparison and digest of nested samples and batches
reach.py       search for the code and the globals that a data set uses
changes.py     search in the source of a data set, when processes differ, for what its code changes itself
values.py      digests of values: of plain data, or of everything that a value holds
globals.py     comparison of these globals between processes
"""
