"""The jobs of bench_canary.py.

jobs.py      the jobs: script, arguments, data, and how the canaries get a part of the data
data.py      makes the data, equal on every machine
execution.py runs canaries and whole jobs, and keeps what they measured
scoring.py   compares forecasts with the whole jobs
scripts/     the training scripts, which know nothing of canaries
"""
