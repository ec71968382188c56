"""Times the steps of a loader, and profiles it.

phases.py     the phases of a profile run
profiling.py  its profiler, which repeats batches and reports what it measured
timing.py     its step timer
"""
