"""Loaders of iterables: their options, the lanes of each pass, and their batches."""
