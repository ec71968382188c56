"""Times the steps of a loader, and profiles it.

phases.py     the phases of a profile run
profiling.py  the profiler of a loader, which repeats batches and reports what it measured
timing.py     the step timer of a loader
"""
