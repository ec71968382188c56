"""The combinations of levels that a study runs.

constraints.py  derives the quantities of each cell, such as epochs from a fixed number of steps
designs.py      which combinations of levels run, and the correlations between factors
"""
