"""Which samples come where in a pass, where that is more than a permutation of all samples.

permutations.py  permutations that give any place at once
windows.py       rows of files, shuffled within windows
mixtures.py      several sources in given shares
sources.py       a data set of several data sets, each with a name
token_budgets.py batches by tokens, equal on all ranks
plan.py          what each plan offers

A plan is a function of seed, epoch and position. The loader of each rank computes it by itself.
"""
