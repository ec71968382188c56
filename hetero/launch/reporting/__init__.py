"""What a launcher shows and writes about a run.

profiling.py     a profile run: its phases, its end, its files
progress.py      the progress line
summaries.py     the summaries in a report of a rank
summary.py       metrics and report of a run
timeline.py      when hosts came and went and processes restarted, for the report
metric_lines.py  metrics as log lines for the platform
"""
