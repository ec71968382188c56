"""Which data a run trained on: a ledger per rank, and the comparison of two runs' ledgers."""
