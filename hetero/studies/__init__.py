"""Studies: runs, planned as a table, executed, measured and compared."""
