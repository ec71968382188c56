"""The machine: processes, logs, files, memory. This package does not know batches or jobs.

cgroups.py           CPU and memory limits of this container
cpu_pressure.py      how short the CPUs of the machine are
extensions.py        parts of hetero that other packages may bring
fault_injection.py   faults that an environment variable enables, for tests and drills
line_relay.py        copies the output of child processes line by line
logs.py              log lines with a prefix, each on one line
memory.py            memory of a process, malloc's thresholds
open_files.py        the files and connections that a process has open
process.py           starting, watching and ending child processes
scripts.py           finds the user's script, a file or a module
stop_signals.py      the signal that ends a process, and protection against signals to all processes of a job
waits.py             times to wait that many modules share, and a log of long waits
workdir.py           private folders that are removed with their process
"""
