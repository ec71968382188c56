"""Records the data that a run trained on in one ledger per rank, and compares the ledgers of two runs."""
