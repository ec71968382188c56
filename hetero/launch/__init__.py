"""One host's life in a job: the launcher process, what it starts and how it ends.

entry.py         from the command line to a launcher
launcher.py      a launcher process: signals, exit code
host.py          one host: endpoints, ranks, report, failure file
roles.py         what a data host and a trainer host do, step by step
job.py           the name of the job
placement.py     how many endpoints and ranks a host runs
addresses.py     where launchers listen
progress.py      the line of progress
staged.py        files that a launcher hands to its children
summary.py       what a run leaves: metrics, report
failure.py       the failure file and the exit code
metric_lines.py  metrics as lines for the platform
service_watch.py what a trainer host follows of tf.data service
watchdog.py      ends a launcher that stands still
ranks/           how ranks are started: torchrun, TensorFlow, MPI
"""
