"""Loaders of iterables, whose batches come from lanes (`hetero.plans.lanes`).

pipeline.py  order, position and state of such a loader
exchange.py  what its ranks tell each other
"""
